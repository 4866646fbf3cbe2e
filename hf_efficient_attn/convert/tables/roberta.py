"""RoBERTa and XLM-RoBERTa: dense; become sparse and long, as the authors of Longformer made theirs.

The position table begins with pad_token_id + 1 rows that no token has.
"""

from dataclasses import replace
from typing import Any

from hf_efficient_attn.convert.counterpart import Counterpart, separator_of
from hf_efficient_attn.convert.tables import bert_layout as bert
from hf_efficient_attn.convert.tables.bert import BERT, check_encoder


def to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return what no field of theirs says by itself.

    Raises:
        ConfigurationError: a decoder, positions relative to each other, or no padding token.
    """
    check_encoder(config)
    offset = bert.rows_before_positions(config)
    return {
        "position_offset": offset,
        "max_position_embeddings": config.max_position_embeddings - offset,
        "sep_token_id": separator_of(config),
        **bert.classifier_fields(config, has_own_dropout=head != "MultipleChoice"),
        "lm_transform_activation": bert.ROBERTA_LM_ACTIVATION,
    }


ROBERTA = replace(
    BERT,
    model_type="roberta",
    prefix="roberta.",
    heads=bert.roberta_heads("roberta."),
    to_ours=to_ours,
    left_behind=("pooler.dense",),
    unused=bert.ROBERTA_UNUSED,
)
XLM_ROBERTA: Counterpart = replace(ROBERTA, model_type="xlm-roberta")
