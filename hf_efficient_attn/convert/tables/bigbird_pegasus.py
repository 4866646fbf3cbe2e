"""BigBird-Pegasus: Pegasus' pre-norm layout, BigBird's blocks in the encoder.

By default the function of the paper, with `parity` that of transformers: see `big_bird`.
"""

from typing import Any

from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.tables import bart_layout as bart
from hf_efficient_attn.convert.tables.bigbird_blocks import bigbird_deviations, bigbird_fields, bigbird_numbers

SELF_ATTENTION = "encoder.layers.*.self_attn"


def to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return what no field of theirs says by itself.

    Raises:
        ConfigurationError: encoder and decoder of different shapes.
    """
    return {
        **bigbird_fields(config, parity),
        # what is dropped in the decoder, too
        "attention_dropout": config.attention_dropout,
        "attention_bias": config.use_bias,
        "attention_output_bias": config.use_bias,
        "norm_position": "pre",
        "embedding_norm": False,
        "scale_embedding": config.scale_embedding,
        **bart.common_fields(config, config.max_position_embeddings, config.max_position_embeddings),
    }


def to_theirs(config: Any) -> dict[str, Any]:
    """Return their blocks; they have one length for both sides."""
    return {
        **bart.decoder_sizes(config),
        **bigbird_numbers(config, "bigbird_pegasus"),
        "use_bias": config.attention_bias,
        "scale_embedding": config.scale_embedding,
        "max_position_embeddings": config.max_position_embeddings,
    }


BIGBIRD_PEGASUS = Counterpart(
    model_type="bigbird_pegasus",
    family="sparse_seq2seq",
    prefix="model.",
    names={
        **bart.AROUND,
        **bart.LEARNED_POSITIONS,
        "encoder.layernorm_embedding": "encoder.norm",
        "decoder.layernorm_embedding": "decoder.norm",
        **bart.projections(f"{SELF_ATTENTION}.self", SELF_ATTENTION),
        f"{SELF_ATTENTION}.output": f"{SELF_ATTENTION}.o_proj",
    },
    heads=bart.HEADS,
    fields=bart.FIELDS,
    to_ours=to_ours,
    to_theirs=to_theirs,
    copies=bart.COPIES,
    deviations={**bart.DEVIATIONS, **bigbird_deviations("bigbird_pegasus")},
    two_labels=("QuestionAnswering",),
    ignored_fields=(
        *bart.IGNORED_FIELDS,
        "attention_type",
        "block_size",
        "max_position_embeddings",
        "num_random_blocks",
        "use_bias",
    ),
)
