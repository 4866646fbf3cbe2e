"""Names that BART and all that followed it share: LED, Pegasus, BigBird-Pegasus, Marian."""

from typing import Any

from hf_efficient_attn.errors import ConfigurationError


def attention(theirs: str, ours: str, output: str = "out_proj") -> dict[str, str]:
    """Return the names of one attention of a layer."""
    maps = {f"{theirs}.{name}_proj": f"{ours}.{name}_proj" for name in "qkv"}
    return {**maps, f"{theirs}.{output}": f"{ours}.o_proj"}


def projections(theirs: str, ours: str, suffix: str = "") -> dict[str, str]:
    """Return the names of an attention's projections where theirs are spelled out, with a suffix if they have one."""
    return {f"{theirs}.{name}{suffix}": f"{ours}.{name[0]}_proj" for name in ("query", "key", "value")}


ENCODER_ATTENTION = attention("encoder.layers.*.self_attn", "encoder.layers.*.self_attn")
# what surrounds the attention of the encoder
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
    """Return our fields that all of them have, with the lengths of their position tables.

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
                f"encoder_{name}={encoder} and decoder_{name}={decoder}: sparse_seq2seq has one value for both sides."
            )


def decoder_sizes(config: Any) -> dict[str, Any]:
    """Return the fields that their configs have once more for the decoder."""
    return {
        "decoder_attention_heads": config.num_attention_heads,
        "decoder_ffn_dim": config.intermediate_size,
    }
