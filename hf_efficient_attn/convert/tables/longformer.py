"""Longformer: RoBERTa's layout, a window per layer, and global tokens with projections of their own.

The position table begins with pad_token_id + 1 rows that no token has. Global tokens are chosen by the head.
"""

from typing import Any

from hf_efficient_attn.convert.configs import bands_of_windows, windows_of_pattern
from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.tables import bert_layout as bert


def to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return what no field of theirs says by itself; `parity` changes nothing.

    Raises:
        ConfigurationError: no padding token.
    """
    offset = bert.rows_before_positions(config)
    return {
        "attention_pattern": bands_of_windows(config.attention_window, config.num_hidden_layers),
        "global_tokens": "auto",
        "global_projections": True,
        "position_offset": offset,
        "max_position_embeddings": config.max_position_embeddings - offset,
        **bert.classifier_fields(config, has_own_dropout=False),
        "lm_transform_activation": bert.ROBERTA_LM_ACTIVATION,
    }


def to_theirs(config: Any) -> dict[str, Any]:
    """Return their windows and rows of the position table.

    Raises:
        ConfigurationError: no padding token, or a layer that is no symmetric band.
    """
    return {
        "attention_window": windows_of_pattern(config, "longformer"),
        "max_position_embeddings": config.max_position_embeddings + bert.rows_before_positions(config),
    }


LONGFORMER = Counterpart(
    model_type="longformer",
    family="sparse_transformer",
    prefix="longformer.",
    names={**bert.NAMES, **bert.GLOBAL_ATTENTION},
    heads=bert.roberta_heads("longformer."),
    fields=bert.FIELDS,
    to_ours=to_ours,
    to_theirs=to_theirs,
    left_behind=("pooler.dense",),
    unused=bert.ROBERTA_UNUSED,
    deviations={
        **bert.DEVIATIONS,
        "global_tokens": "longformer has global tokens by the head alone; pass global_attention_mask for others",
        "max_global_tokens": "only compiled models need it",
    },
    # the first two are of the authors' own code, and read by nothing in transformers
    ignored_fields=("attention_mode", "ignore_attention_mask", "attention_window", "max_position_embeddings"),
)
