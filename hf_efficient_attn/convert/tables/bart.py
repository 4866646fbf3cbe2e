"""BART: dense; its encoder becomes sparse and long, as the authors of LED made theirs.

The position tables begin with two rows that no token has.
"""

from typing import Any

from hf_efficient_attn.convert.counterpart import Counterpart, separator_of
from hf_efficient_attn.convert.tables import bart_layout as bart

OFFSET = 2


def to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return what no field of theirs says by itself.

    Raises:
        ConfigurationError: encoder and decoder of different shapes.
    """
    return {
        "position_offset": OFFSET,
        "scale_embedding": config.scale_embedding,
        **bart.common_fields(config, config.max_position_embeddings, config.max_position_embeddings),
        "sep_token_id": separator_of(config),
    }


BART = Counterpart(
    model_type="bart",
    family="sparse_seq2seq",
    prefix="model.",
    names={**bart.AROUND, **bart.LEARNED_POSITIONS, **bart.EMBEDDING_NORMS, **bart.ENCODER_ATTENTION},
    heads=bart.HEADS,
    fields=bart.FIELDS,
    to_ours=to_ours,
    copies=bart.COPIES,
    two_labels=("QuestionAnswering",),
    ignored_fields=(*bart.IGNORED_FIELDS, "max_position_embeddings"),
    is_dense=True,
)
