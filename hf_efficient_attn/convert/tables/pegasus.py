"""Pegasus and Marian: dense, with sinusoids, which need no longer table; their encoders become sparse.

Pegasus is pre-norm with a norm behind each stack, Marian post-norm without.
"""

from dataclasses import replace
from typing import Any

from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.tables import bart_layout as bart
from hf_efficient_attn.convert.tables.bart import BART
from hf_efficient_attn.errors import ConfigurationError

SINUSOIDS = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")


def sinusoidal_fields(config: Any) -> dict[str, Any]:
    """Return what both have in common.

    Raises:
        ConfigurationError: sides of different shapes; or embeddings that are not scaled, under sinusoids of full size.
    """
    if not config.scale_embedding:
        raise ConfigurationError(
            f"scale_embedding=False: sparse_seq2seq adds sinusoids of amplitude {config.init_std} to embeddings that "
            f"are not scaled, {config.model_type} of amplitude 1. Published checkpoints have scale_embedding=True."
        )
    return {
        "position_embedding_type": "sinusoidal",
        "sinusoid_layout": "halves",
        "embedding_norm": False,
        "scale_embedding": True,
        **bart.common_fields(config, config.max_position_embeddings, config.max_position_embeddings),
    }


def pegasus_to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return what no field of theirs says by itself."""
    return {**sinusoidal_fields(config), "norm_position": "pre"}


def marian_to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return what no field of theirs says by itself.

    Raises:
        ConfigurationError: embeddings or vocabularies that source and target do not share.
    """
    if not config.share_encoder_decoder_embeddings or config.decoder_vocab_size != config.vocab_size:
        raise ConfigurationError(
            f"share_encoder_decoder_embeddings={config.share_encoder_decoder_embeddings}, vocab_size="
            f"{config.vocab_size}, decoder_vocab_size={config.decoder_vocab_size}: source and target of sparse_seq2seq "
            "share vocabulary and embedding."
        )
    return sinusoidal_fields(config)


PEGASUS: Counterpart = replace(
    BART,
    model_type="pegasus",
    names={
        **bart.AROUND,
        **bart.ENCODER_ATTENTION,
        "encoder.layer_norm": "encoder.norm",
        "decoder.layer_norm": "decoder.norm",
    },
    heads={"Model": {}, "ConditionalGeneration": bart.GENERATION},
    to_ours=pegasus_to_ours,
    recomputed=SINUSOIDS,
)
MARIAN: Counterpart = replace(
    PEGASUS,
    model_type="marian",
    names={**bart.AROUND, **bart.ENCODER_ATTENTION},
    to_ours=marian_to_ours,
    ignored_fields=(*BART.ignored_fields, "decoder_vocab_size", "share_encoder_decoder_embeddings"),
)
