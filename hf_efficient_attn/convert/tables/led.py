"""LED: BART's layout, windows in the encoder, global tokens with projections of their own.

Its authors make the first token global, which transformers leaves to the caller: by default the first token is global
here, with `parity` none is, unless a call has a `global_attention_mask`.
"""

from typing import Any

from hf_efficient_attn.convert.configs import bands_of_windows, windows_of_pattern
from hf_efficient_attn.convert.counterpart import Counterpart, separator_of
from hf_efficient_attn.convert.tables import bart_layout as bart

SELF_ATTENTION = "encoder.layers.*.self_attn"
LONGFORMER_ATTENTION = f"{SELF_ATTENTION}.longformer_self_attn"


def to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return what no field of theirs says by itself.

    Raises:
        ConfigurationError: encoder and decoder of different shapes.
    """
    return {
        "attention_pattern": bands_of_windows(config.attention_window, config.encoder_layers),
        "global_tokens": None if parity else "first",
        "global_projections": True,
        **bart.common_fields(config, config.max_encoder_position_embeddings, config.max_decoder_position_embeddings),
        "sep_token_id": separator_of(config),
    }


def to_theirs(config: Any) -> dict[str, Any]:
    """Return their windows and lengths."""
    return {
        **bart.decoder_sizes(config),
        "attention_window": windows_of_pattern(config, "led"),
        "max_encoder_position_embeddings": config.max_position_embeddings,
        "max_decoder_position_embeddings": config.max_target_position_embeddings,
    }


LED = Counterpart(
    model_type="led",
    family="sparse_seq2seq",
    prefix="led.",
    names={
        **bart.AROUND,
        **bart.LEARNED_POSITIONS,
        **bart.EMBEDDING_NORMS,
        **bart.projections(LONGFORMER_ATTENTION, SELF_ATTENTION),
        f"{SELF_ATTENTION}.output": f"{SELF_ATTENTION}.o_proj",
        **bart.projections(LONGFORMER_ATTENTION, f"{SELF_ATTENTION}.global_attention", "_global"),
    },
    heads={"Model": {}, "ConditionalGeneration": bart.GENERATION, "QuestionAnswering": bart.ANSWER},
    fields=bart.FIELDS,
    to_ours=to_ours,
    to_theirs=to_theirs,
    copies=bart.COPIES,
    deviations={
        **bart.DEVIATIONS,
        "global_tokens": "led has no global tokens but those of a call's global_attention_mask",
    },
    two_labels=("QuestionAnswering",),
    ignored_fields=(
        *bart.IGNORED_FIELDS,
        "attention_window",
        "max_decoder_position_embeddings",
        "max_encoder_position_embeddings",
    ),
)
