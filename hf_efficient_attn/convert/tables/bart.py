"""Tables of encoder-decoders: BART, LED, Pegasus and Marian, and the names that they and BigBird-Pegasus share.

BART: dense; its encoder becomes sparse and long, as the authors of LED made theirs.

The position tables begin with two unused rows.

LED: BART's layout, windows in the encoder, global tokens with projections of their own.

Its authors make the first token global; transformers leaves this to the caller. By default the first token is global
here; with `parity` no token is global unless a call passes a `global_attention_mask`.

Pegasus and Marian: dense; their encoders become sparse. Their sinusoids exist at any length, without a longer table.

Pegasus is pre-norm with a norm after each stack; Marian is post-norm without one.
"""

from dataclasses import replace
from typing import Any

from hf_efficient_attn.convert.configs import bands_of_windows, windows_of_pattern
from hf_efficient_attn.convert.counterpart import Counterpart, separator_of
from hf_efficient_attn.errors import ConfigurationError


def attention(theirs: str, ours: str, output: str = "out_proj") -> dict[str, str]:
    """Return the names of the projections of one attention of a layer."""
    maps = {f"{theirs}.{name}_proj": f"{ours}.{name}_proj" for name in "qkv"}
    return {**maps, f"{theirs}.{output}": f"{ours}.o_proj"}


def projections(theirs: str, ours: str, suffix: str = "") -> dict[str, str]:
    """Return the names of an attention's projections if theirs are "query", "key" and "value" plus a suffix."""
    return {f"{theirs}.{name}{suffix}": f"{ours}.{name[0]}_proj" for name in ("query", "key", "value")}


ENCODER_ATTENTION = attention("encoder.layers.*.self_attn", "encoder.layers.*.self_attn")
# everything except positions, embedding norms, final norms, and the attention of the encoder
AROUND = {
    "shared": "embed_tokens",
    "encoder.layers.*.self_attn_layer_norm": "encoder.layers.*.attention_norm",
    "encoder.layers.*.fc1": "encoder.layers.*.mlp.up_proj",
    "encoder.layers.*.fc2": "encoder.layers.*.mlp.down_proj",
    "encoder.layers.*.final_layer_norm": "encoder.layers.*.mlp_norm",
    **attention("decoder.layers.*.self_attn", "decoder.layers.*.self_attn"),
    "decoder.layers.*.self_attn_layer_norm": "decoder.layers.*.attention_norm",
    **attention("decoder.layers.*.encoder_attn", "decoder.layers.*.cross_attn"),
    "decoder.layers.*.encoder_attn_layer_norm": "decoder.layers.*.cross_norm",
    "decoder.layers.*.fc1": "decoder.layers.*.mlp.up_proj",
    "decoder.layers.*.fc2": "decoder.layers.*.mlp.down_proj",
    "decoder.layers.*.final_layer_norm": "decoder.layers.*.mlp_norm",
}
LEARNED_POSITIONS = {
    "encoder.embed_positions": "encoder.embeddings.positions.table",
    "decoder.embed_positions": "decoder.embeddings.positions.table",
}
EMBEDDING_NORMS = {
    "encoder.layernorm_embedding": "encoder.embeddings.norm",
    "decoder.layernorm_embedding": "decoder.embeddings.norm",
}
COPIES = {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"}

GENERATION = {"final_logits_bias": "lm_head.bias", "lm_head.weight": "lm_head.weight"}
CLASSIFIER = {
    "classification_head.dense": "classifier.dense",
    "classification_head.out_proj": "classifier.out_proj",
}
ANSWER = {"qa_outputs": "qa_outputs"}
HEADS = {
    "Model": {},
    "ConditionalGeneration": GENERATION,
    "SequenceClassification": CLASSIFIER,
    "QuestionAnswering": ANSWER,
}

FIELDS: dict[str, str | tuple[str, ...]] = {
    "d_model": "hidden_size",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
    "activation_function": "hidden_act",
    "dropout": ("hidden_dropout", "embedding_dropout"),
    "activation_dropout": "activation_dropout",
    "attention_dropout": "attention_dropout",
    "init_std": "initializer_range",
    "classifier_dropout": "classifier_dropout",
    "decoder_start_token_id": "decoder_start_token_id",
}
IGNORED_FIELDS = ("decoder_attention_heads", "decoder_ffn_dim", "is_decoder", "scale_embedding")
DEVIATIONS = {
    "embedding_dropout": "the target has one dropout for embeddings and hidden states",
    "label_smoothing": "the target's loss has none; Trainer's label_smoothing_factor does the same",
    "max_global_tokens": "only compiled models need it",
    "sep_token_id": "the target has no rule for global tokens",
}


def common_fields(config: Any, source_tokens: int, target_tokens: int) -> dict[str, Any]:
    """Return the fields of our config that all encoder-decoders set, with the lengths of their position tables.

    Raises:
        ConfigurationError: encoder and decoder of different shapes.
    """
    check_sides(config)
    return {
        "max_position_embeddings": source_tokens,
        "max_target_position_embeddings": target_tokens,
        "lm_head_bias": True,
    }


def check_sides(config: Any) -> None:
    """Raise ConfigurationError if encoder and decoder have different shapes."""
    for name in ("attention_heads", "ffn_dim"):
        encoder, decoder = getattr(config, f"encoder_{name}"), getattr(config, f"decoder_{name}")
        if encoder != decoder:
            raise ConfigurationError(
                f"encoder_{name}={encoder} and decoder_{name}={decoder} must be equal, because sparse_seq2seq has one "
                "value for encoder and decoder."
            )


def decoder_sizes(config: Any) -> dict[str, Any]:
    """Return the sizes that their configs repeat for the decoder."""
    return {
        "decoder_attention_heads": config.num_attention_heads,
        "decoder_ffn_dim": config.intermediate_size,
    }


OFFSET = 2


def bart_to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return the fields of our config that are not simply copied from theirs.

    Raises:
        ConfigurationError: encoder and decoder of different shapes.
    """
    return {
        "position_offset": OFFSET,
        "scale_embedding": config.scale_embedding,
        **common_fields(config, config.max_position_embeddings, config.max_position_embeddings),
        "sep_token_id": separator_of(config),
    }


BART = Counterpart(
    model_type="bart",
    family="sparse_seq2seq",
    prefix="model.",
    names={**AROUND, **LEARNED_POSITIONS, **EMBEDDING_NORMS, **ENCODER_ATTENTION},
    heads=HEADS,
    fields=FIELDS,
    to_ours=bart_to_ours,
    copies=COPIES,
    two_labels=("QuestionAnswering",),
    ignored_fields=(*IGNORED_FIELDS, "max_position_embeddings"),
    is_dense=True,
)


SELF_ATTENTION = "encoder.layers.*.self_attn"
LONGFORMER_ATTENTION = f"{SELF_ATTENTION}.longformer_self_attn"


def led_to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return the fields of our config that are not simply copied from theirs.

    Raises:
        ConfigurationError: encoder and decoder of different shapes.
    """
    return {
        "attention_pattern": bands_of_windows(config.attention_window, config.encoder_layers),
        "global_tokens": None if parity else "first",
        "global_projections": True,
        **common_fields(config, config.max_encoder_position_embeddings, config.max_decoder_position_embeddings),
        "sep_token_id": separator_of(config),
    }


def led_to_theirs(config: Any) -> dict[str, Any]:
    """Return the fields of their config that are not simply copied from ours: sizes, windows and lengths."""
    return {
        **decoder_sizes(config),
        "attention_window": windows_of_pattern(config, "led"),
        "max_encoder_position_embeddings": config.max_position_embeddings,
        "max_decoder_position_embeddings": config.max_target_position_embeddings,
    }


LED = Counterpart(
    model_type="led",
    family="sparse_seq2seq",
    prefix="led.",
    names={
        **AROUND,
        **LEARNED_POSITIONS,
        **EMBEDDING_NORMS,
        **projections(LONGFORMER_ATTENTION, SELF_ATTENTION),
        f"{SELF_ATTENTION}.output": f"{SELF_ATTENTION}.o_proj",
        **projections(LONGFORMER_ATTENTION, f"{SELF_ATTENTION}.global_attention", "_global"),
    },
    heads={"Model": {}, "ConditionalGeneration": GENERATION, "QuestionAnswering": ANSWER},
    fields=FIELDS,
    to_ours=led_to_ours,
    to_theirs=led_to_theirs,
    copies=COPIES,
    deviations={
        **DEVIATIONS,
        "global_tokens": "led has no global tokens except those that a call gives in global_attention_mask",
    },
    two_labels=("QuestionAnswering",),
    ignored_fields=(
        *IGNORED_FIELDS,
        "attention_window",
        "max_decoder_position_embeddings",
        "max_encoder_position_embeddings",
    ),
)


SINUSOIDS = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")


def sinusoidal_fields(config: Any) -> dict[str, Any]:
    """Return the fields of our config that Pegasus and Marian share.

    Raises:
        ConfigurationError: encoder and decoder of different shapes, or unscaled embeddings with sinusoids of
            amplitude 1.
    """
    if not config.scale_embedding:
        raise ConfigurationError(
            f"scale_embedding=False cannot be converted: to unscaled embeddings sparse_seq2seq adds sinusoids of "
            f"amplitude {config.init_std}, and {config.model_type} of amplitude 1. Published checkpoints have "
            "scale_embedding=True."
        )
    return {
        "position_embedding_type": "sinusoidal",
        "sinusoid_layout": "halves",
        "embedding_norm": False,
        "scale_embedding": True,
        **common_fields(config, config.max_position_embeddings, config.max_position_embeddings),
    }


def pegasus_to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return the fields of our config that are not simply copied from theirs."""
    return {**sinusoidal_fields(config), "norm_position": "pre"}


def marian_to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return the fields of our config that are not simply copied from theirs.

    Raises:
        ConfigurationError: embeddings or vocabularies that source and target do not share.
    """
    if not config.share_encoder_decoder_embeddings or config.decoder_vocab_size != config.vocab_size:
        raise ConfigurationError(
            f"share_encoder_decoder_embeddings={config.share_encoder_decoder_embeddings}, vocab_size="
            f"{config.vocab_size}, decoder_vocab_size={config.decoder_vocab_size} cannot be converted: encoder and "
            "decoder of sparse_seq2seq share the vocabulary and the embedding."
        )
    return sinusoidal_fields(config)


PEGASUS: Counterpart = replace(
    BART,
    model_type="pegasus",
    names={
        **AROUND,
        **ENCODER_ATTENTION,
        "encoder.layer_norm": "encoder.norm",
        "decoder.layer_norm": "decoder.norm",
    },
    heads={"Model": {}, "ConditionalGeneration": GENERATION},
    to_ours=pegasus_to_ours,
    recomputed=SINUSOIDS,
)
MARIAN: Counterpart = replace(
    PEGASUS,
    model_type="marian",
    names={**AROUND, **ENCODER_ATTENTION},
    to_ours=marian_to_ours,
    ignored_fields=(*BART.ignored_fields, "decoder_vocab_size", "share_encoder_decoder_embeddings"),
)
