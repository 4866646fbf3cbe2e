"""Table of Reformer: the same layers, without the errors of transformers (see the family's card).

Before transformers 5.24, language models ignore the bias of the vocabulary: the parameter is in every checkpoint, but
no output depends on it. Here it is used; with `parity` it is left behind. From 5.24 on, they have two such parameters
and use the newer one, `lm_head.decoder.bias`.
"""

from math import prod
from typing import Any

import transformers

from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.tables import bert
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.requirements import fits

LAYER = "encoder.layers.*"
SELF = f"{LAYER}.attention.self_attention"
BIAS_ACTS = fits(transformers.__version__, "5.24", None)


def to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return the fields of our config that are not simply copied from theirs.

    Raises:
        ConfigurationError: a causal language model that is not a decoder, or a masked one that is.
    """
    if head in ("CausalLM", "MaskedLM") and config.is_decoder is not (head == "CausalLM"):
        raise ConfigurationError(
            f"The reformer config has is_decoder={config.is_decoder}, which does not fit the head {head}. Correct "
            "it, or choose another head."
        )
    dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    is_axial = config.axial_pos_embds
    return {
        "attn_layers": list(config.attn_layers),
        "num_hidden_layers": len(config.attn_layers),
        "position_embedding_type": "axial" if is_axial else "learned",
        "axial_pos_shape": list(config.axial_pos_shape) if is_axial else None,
        "axial_pos_embds_dim": list(config.axial_pos_embds_dim) if is_axial else None,
        # transformers' model runs with axes for fewer positions, but not on longer texts
        "max_position_embeddings": min(config.max_position_embeddings, prod(config.axial_pos_shape))
        if is_axial
        else config.max_position_embeddings,
        "local_wraps": not config.is_decoder,
        "stream_join": "concat",
        "lm_head_bias": BIAS_ACTS or not parity,
        "classifier_dropout": dropout,
        "classifier_head": "dense",
        "classifier_pooling": "first",
    }


def to_theirs(config: Any) -> dict[str, Any]:
    """Return the fields of their config that are not simply copied from ours.

    Raises:
        ConfigurationError: positions that are neither axial nor learned.
    """
    if config.position_embedding_type not in ("axial", "learned"):
        raise ConfigurationError(
            f"reformer has axial or learned positions, not position_embedding_type="
            f"{shown(config.position_embedding_type)}."
        )
    is_axial = config.position_embedding_type == "axial"
    axes = {"axial_pos_shape": config.axial_shape, "axial_pos_embds_dim": config.axial_widths} if is_axial else {}
    return {
        "attn_layers": list(config.layer_kinds),
        "axial_pos_embds": is_axial,
        "max_position_embeddings": config.max_position_embeddings,
        "classifier_dropout": config.classifier_dropout,
        **axes,
    }


def tokens_alike(config: Any, theirs: Any) -> int:
    """Return the length of a chunk: longer texts are hashed, with rotations that transformers draws at every call."""
    return min(config.lsh_attn_chunk_length, config.local_attn_chunk_length)


NO_BIAS = "reformer saves the bias of the vocabulary, but no output uses it"
OLD_BIAS = {"lm_head.bias": "lm_head.bias"}
# the first entry that matches is used
LM_HEAD = {"lm_head.decoder": "lm_head", **OLD_BIAS} if BIAS_ACTS else {**OLD_BIAS, "lm_head.decoder": "lm_head"}

REFORMER = Counterpart(
    model_type="reformer",
    family="efficient_reformer",
    prefix="reformer.",
    names={
        "embeddings.word_embeddings": "embed_tokens",
        "embeddings.position_embeddings.weights.*": "positions.table.axis_*",
        "embeddings.position_embeddings.embedding": "positions.table",
        f"{LAYER}.attention.layer_norm": "layers.*.attention_norm",
        f"{SELF}.query_key": "layers.*.self_attn.qk_proj",
        f"{SELF}.query": "layers.*.self_attn.q_proj",
        f"{SELF}.key": "layers.*.self_attn.k_proj",
        f"{SELF}.value": "layers.*.self_attn.v_proj",
        f"{LAYER}.attention.output.dense": "layers.*.self_attn.o_proj",
        f"{LAYER}.feed_forward.layer_norm": "layers.*.mlp_norm",
        f"{LAYER}.feed_forward.dense.dense": "layers.*.mlp.up_proj",
        f"{LAYER}.feed_forward.output.dense": "layers.*.mlp.down_proj",
        "encoder.layer_norm": "norm",
    },
    heads={
        "Model": {},
        "MaskedLM": LM_HEAD,
        "CausalLM": LM_HEAD,
        "SequenceClassification": bert.ROBERTA_CLASSIFIER,
        "QuestionAnswering": {"qa_outputs": "qa_outputs"},
    },
    fields={
        "hidden_size": "hidden_size",
        "attention_head_size": "head_dim",
        "num_attention_heads": "num_attention_heads",
        "feed_forward_size": "intermediate_size",
        "hidden_act": "hidden_act",
        "is_decoder": "is_causal",
        "axial_norm_std": "axial_norm_std",
        "num_buckets": "num_buckets",
        "num_hashes": "num_hashes",
        "hash_seed": "hash_seed",
        "lsh_attn_chunk_length": "lsh_attn_chunk_length",
        "lsh_num_chunks_before": "lsh_num_chunks_before",
        "lsh_num_chunks_after": "lsh_num_chunks_after",
        "local_attn_chunk_length": "local_attn_chunk_length",
        "local_num_chunks_before": "local_num_chunks_before",
        "local_num_chunks_after": "local_num_chunks_after",
        "chunk_size_lm_head": "chunk_size_lm_head",
        "hidden_dropout_prob": ("hidden_dropout", "embedding_dropout", "activation_dropout"),
        "local_attention_probs_dropout_prob": "attention_dropout",
        "lsh_attention_probs_dropout_prob": "lsh_attention_dropout",
        "initializer_range": "initializer_range",
        "layer_norm_eps": "norm_eps",
    },
    to_ours=to_ours,
    to_theirs=to_theirs,
    tokens_alike=tokens_alike,
    left_behind=("lm_head.bias",),
    unused={"lm_head.bias": "lm_head.decoder.bias"} if BIAS_ACTS else {},
    optional={"lm_head.bias": "lm_head_bias"},
    deviations=({} if BIAS_ACTS else {"lm_head_bias": NO_BIAS})
    | {
        "embedding_dropout": "reformer has one dropout for embeddings, hidden states and activations",
        "activation_dropout": "reformer has one dropout for embeddings, hidden states and activations",
        "attn_layers": "reformer lists the layers one by one",
        "lsh_attention_dropout": "reformer always has a number",
    },
    ignored_fields=(
        "attn_layers",
        "axial_pos_embds",
        "axial_pos_shape",
        "axial_pos_embds_dim",
        "classifier_dropout",
        "max_position_embeddings",
        "num_hidden_layers",
    ),
)
