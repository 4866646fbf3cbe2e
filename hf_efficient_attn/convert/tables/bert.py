"""Tables of encoders: BERT, RoBERTa, XLM-RoBERTa, Longformer and ModernBERT, and the names that all but the last share.

BERT: dense; becomes sparse and long.

RoBERTa and XLM-RoBERTa: dense; become sparse and long, as the authors of Longformer made theirs.

The position table begins with pad_token_id + 1 unused rows.

Longformer: RoBERTa's layout, a window per layer, and global tokens with projections of their own.

The position table begins with pad_token_id + 1 unused rows. The head decides which tokens are global.

ModernBERT: pre-norm, gated MLPs, rotary positions; full layers become sparse, sliding ones stay.

It fuses queries, keys and values, and the MLP's gate and input. Here dropout applies to the output of each block;
transformers applies `mlp_dropout` to the activations of the MLP, and `attention_dropout` to the output of attention.
"""

from dataclasses import replace
from typing import Any

from hf_efficient_attn.convert.configs import bands_of_windows, windows_of_pattern
from hf_efficient_attn.convert.counterpart import Counterpart, separator_of
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.bands import Band

ATTENTION = {
    "encoder.layer.*.attention.self.query": "layers.*.self_attn.q_proj",
    "encoder.layer.*.attention.self.key": "layers.*.self_attn.k_proj",
    "encoder.layer.*.attention.self.value": "layers.*.self_attn.v_proj",
    "encoder.layer.*.attention.output.dense": "layers.*.self_attn.o_proj",
    "encoder.layer.*.attention.output.LayerNorm": "layers.*.attention_norm",
}
GLOBAL_ATTENTION = {
    "encoder.layer.*.attention.self.query_global": "layers.*.self_attn.global_attention.q_proj",
    "encoder.layer.*.attention.self.key_global": "layers.*.self_attn.global_attention.k_proj",
    "encoder.layer.*.attention.self.value_global": "layers.*.self_attn.global_attention.v_proj",
}
NAMES = {
    "embeddings.word_embeddings": "embed_tokens",
    "embeddings.position_embeddings": "embeddings.positions.table",
    "embeddings.token_type_embeddings": "embeddings.token_types",
    "embeddings.LayerNorm": "embeddings.norm",
    **ATTENTION,
    "encoder.layer.*.intermediate.dense": "layers.*.mlp.up_proj",
    "encoder.layer.*.output.dense": "layers.*.mlp.down_proj",
    "encoder.layer.*.output.LayerNorm": "layers.*.mlp_norm",
}

# heads of BERT, heads of RoBERTa, and heads that all have
BERT_LM_HEAD = {
    "cls.predictions.transform.dense": "transform.dense",
    "cls.predictions.transform.LayerNorm": "transform.norm",
    "cls.predictions.decoder": "lm_head",
}
BERT_CAUSAL_LM_HEAD = {
    "cls.predictions.transform.dense": "model.transform.dense",
    "cls.predictions.transform.LayerNorm": "model.transform.norm",
    "cls.predictions.decoder": "lm_head",
}
BERT_UNUSED = {"cls.predictions.bias": "cls.predictions.decoder.bias"}
ROBERTA_LM_HEAD = {
    "lm_head.dense": "transform.dense",
    "lm_head.layer_norm": "transform.norm",
    "lm_head.decoder": "lm_head",
}
# hardcoded in transformers, whatever the activation of the MLPs
ROBERTA_LM_ACTIVATION = "gelu"
ROBERTA_UNUSED = {"lm_head.bias": "lm_head.decoder.bias"}
ROBERTA_CLASSIFIER = {"classifier.dense": "classifier.dense", "classifier.out_proj": "classifier.out_proj"}
# after a dense layer that has another name
LABELS = {"classifier": "classifier.out_proj"}
CLASSIFIER = {"classifier": "classifier"}
ANSWER = {"qa_outputs": "qa_outputs"}

FIELDS: dict[str, str | tuple[str, ...]] = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "hidden_act": "hidden_act",
    "hidden_dropout_prob": ("hidden_dropout", "embedding_dropout"),
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "norm_eps",
    "type_vocab_size": "type_vocab_size",
}
DROPOUT = "the target has one dropout for embeddings, hidden states and classifiers"
DEVIATIONS = {"embedding_dropout": DROPOUT, "classifier_dropout": DROPOUT}


def roberta_heads(prefix: str) -> dict[str, dict[str, str]]:
    """Return the heads of RoBERTa and Longformer; `prefix` is the prefix of their backbone."""
    return {
        "Model": {},
        "MaskedLM": ROBERTA_LM_HEAD,
        "SequenceClassification": ROBERTA_CLASSIFIER,
        "TokenClassification": CLASSIFIER,
        "QuestionAnswering": ANSWER,
        "MultipleChoice": {f"{prefix}pooler.dense": "classifier.dense", **LABELS},
    }


def rows_before_positions(config: Any) -> int:
    """Return the number of unused rows before position 0 in the position tables of RoBERTa and Longformer.

    Raises:
        ConfigurationError: no padding token, from which transformers computes this number.
    """
    if config.pad_token_id is None:
        raise ConfigurationError(
            f"The {config.model_type} config has pad_token_id=None, but the position tables of RoBERTa and Longformer "
            "begin with pad_token_id + 1 unused rows. Set pad_token_id."
        )
    return int(config.pad_token_id) + 1


def classifier_fields(config: Any, activation: str = "tanh", has_own_dropout: bool = True) -> dict[str, Any]:
    """Return the fields of heads that apply a dense layer to the first token.

    has_own_dropout: whether their code uses `classifier_dropout` if it is set; otherwise the dropout of hidden states.
    """
    dropout = getattr(config, "classifier_dropout", None) if has_own_dropout else None
    return {
        "classifier_head": "dense",
        "classifier_activation": activation,
        "classifier_pooling": "first",
        "classifier_dropout": config.hidden_dropout_prob if dropout is None else dropout,
    }


def check_encoder(config: Any) -> None:
    """Raise ConfigurationError for a decoder, or for relative positions, which older configs may have."""
    kind = getattr(config, "position_embedding_type", "absolute")
    if config.is_decoder or kind != "absolute":
        raise ConfigurationError(
            f"The {config.model_type} config has is_decoder={config.is_decoder} and position_embedding_type="
            f"{shown(kind)}. Only encoders with absolute positions can be converted."
        )


def bert_to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return the fields of our config that are not simply copied from theirs.

    Raises:
        ConfigurationError: see `check_encoder`.
    """
    check_encoder(config)
    return {"max_position_embeddings": config.max_position_embeddings, **classifier_fields(config)}


BERT = Counterpart(
    model_type="bert",
    family="sparse_transformer",
    prefix="bert.",
    names=NAMES,
    heads={
        "Model": {},
        "MaskedLM": BERT_LM_HEAD,
        "SequenceClassification": {"bert.pooler.dense": "classifier.dense", **LABELS},
        "TokenClassification": CLASSIFIER,
        "QuestionAnswering": ANSWER,
        "MultipleChoice": {"bert.pooler.dense": "classifier.dense", **LABELS},
    },
    fields=FIELDS,
    to_ours=bert_to_ours,
    left_behind=("pooler.dense", "cls.seq_relationship"),
    unused=BERT_UNUSED,
    ignored_fields=(
        "add_cross_attention",
        "classifier_dropout",
        "is_decoder",
        "max_position_embeddings",
        "position_embedding_type",
    ),
    is_dense=True,
)


def roberta_to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return the fields of our config that are not simply copied from theirs.

    Raises:
        ConfigurationError: a decoder, relative positions, or no padding token.
    """
    check_encoder(config)
    offset = rows_before_positions(config)
    return {
        "position_offset": offset,
        "max_position_embeddings": config.max_position_embeddings - offset,
        "sep_token_id": separator_of(config),
        **classifier_fields(config, has_own_dropout=head != "MultipleChoice"),
        "lm_transform_activation": ROBERTA_LM_ACTIVATION,
    }


ROBERTA = replace(
    BERT,
    model_type="roberta",
    prefix="roberta.",
    heads=roberta_heads("roberta."),
    to_ours=roberta_to_ours,
    left_behind=("pooler.dense",),
    unused=ROBERTA_UNUSED,
)
XLM_ROBERTA: Counterpart = replace(ROBERTA, model_type="xlm-roberta")


def longformer_to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return the fields of our config that are not simply copied from theirs; `parity` changes nothing.

    Raises:
        ConfigurationError: no padding token.
    """
    offset = rows_before_positions(config)
    return {
        "attention_pattern": bands_of_windows(config.attention_window, config.num_hidden_layers),
        "global_tokens": "auto",
        "global_projections": True,
        "position_offset": offset,
        "max_position_embeddings": config.max_position_embeddings - offset,
        **classifier_fields(config, has_own_dropout=False),
        "lm_transform_activation": ROBERTA_LM_ACTIVATION,
    }


def longformer_to_theirs(config: Any) -> dict[str, Any]:
    """Return the windows and the length of the position table in their config.

    Raises:
        ConfigurationError: no padding token, or a layer whose pattern is not a symmetric band.
    """
    return {
        "attention_window": windows_of_pattern(config, "longformer"),
        "max_position_embeddings": config.max_position_embeddings + rows_before_positions(config),
    }


LONGFORMER = Counterpart(
    model_type="longformer",
    family="sparse_transformer",
    prefix="longformer.",
    names={**NAMES, **GLOBAL_ATTENTION},
    heads=roberta_heads("longformer."),
    fields=FIELDS,
    to_ours=longformer_to_ours,
    to_theirs=longformer_to_theirs,
    left_behind=("pooler.dense",),
    unused=ROBERTA_UNUSED,
    deviations={
        **DEVIATIONS,
        "global_tokens": "longformer makes tokens global only by its head; pass global_attention_mask for others",
        "max_global_tokens": "only compiled models need it",
    },
    # the first two belong to the authors' own code, and transformers does not use them
    ignored_fields=("attention_mode", "ignore_attention_mask", "attention_window", "max_position_embeddings"),
)


SELF_ATTENTION = "layers.*.self_attn"
TRANSFORM = {"head.dense": "transform.dense", "head.norm": "transform.norm"}
MODERNBERT_CLASSIFIER = {**TRANSFORM, "classifier": "classifier"}
POOLING = {"cls": "first", "mean": "mean"}


def modernbert_to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return the fields of our config that are not simply copied from theirs.

    Raises:
        ConfigurationError: scaled rotary positions.
    """
    kinds = {name: dict(rope) for name, rope in config.rope_parameters.items() if isinstance(rope, dict)}
    scaled = {name: rope for name, rope in kinds.items() if rope.get("rope_type", "default") != "default"}
    if scaled:
        raise ConfigurationError(f"rope_parameters={scaled} cannot be converted, only those with rope_type 'default'.")
    side = config.local_attention // 2
    is_sliding = [kind == "sliding_attention" for kind in config.layer_types]
    return {
        "attention_pattern": [Band(side, side) if sliding else None for sliding in is_sliding],
        "position_embedding_type": "rope",
        "rope_theta_per_layer": [float(kinds[kind]["rope_theta"]) for kind in config.layer_types],
        "max_position_embeddings": config.max_position_embeddings,
        "norm_position": "pre",
        "norm_before_first_layer": False,
        "gated_mlp": True,
        "classifier_head": "transform",
        "question_answering_head": "transform",
        "classifier_pooling": POOLING[config.classifier_pooling],
    }


MODERNBERT = Counterpart(
    model_type="modernbert",
    family="sparse_transformer",
    prefix="model.",
    names={
        "embeddings.tok_embeddings": "embed_tokens",
        "embeddings.norm": "embeddings.norm",
        "layers.*.attn_norm": "layers.*.attention_norm",
        "layers.*.attn.Wqkv": tuple(f"{SELF_ATTENTION}.{name}_proj" for name in "qkv"),
        "layers.*.attn.Wo": f"{SELF_ATTENTION}.o_proj",
        "layers.*.mlp_norm": "layers.*.mlp_norm",
        "layers.*.mlp.Wi": ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"),
        "layers.*.mlp.Wo": "layers.*.mlp.down_proj",
        "final_norm": "norm",
    },
    heads={
        "Model": {},
        "MaskedLM": {**TRANSFORM, "decoder": "lm_head"},
        "SequenceClassification": MODERNBERT_CLASSIFIER,
        "TokenClassification": MODERNBERT_CLASSIFIER,
        "QuestionAnswering": {**TRANSFORM, "classifier": "qa_outputs"},
        "MultipleChoice": MODERNBERT_CLASSIFIER,
    },
    fields={
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "hidden_activation": "hidden_act",
        "initializer_range": "initializer_range",
        "norm_eps": "norm_eps",
        "norm_bias": "norm_bias",
        "attention_bias": ("attention_bias", "attention_output_bias"),
        "mlp_bias": "mlp_bias",
        "embedding_dropout": "embedding_dropout",
        "attention_dropout": "attention_dropout",
        "mlp_dropout": "hidden_dropout",
        "decoder_bias": "lm_head_bias",
        "classifier_activation": "lm_transform_activation",
        "classifier_bias": "lm_transform_bias",
        "classifier_dropout": "classifier_dropout",
    },
    to_ours=modernbert_to_ours,
    ignored_fields=(
        "classifier_pooling",
        "cls_token_id",
        "deterministic_flash_attn",
        "initializer_cutoff_factor",
        "layer_types",
        "local_attention",
        "max_position_embeddings",
        "rope_parameters",
        "sparse_pred_ignore_index",
        "sparse_prediction",
    ),
    is_dense=True,
)
