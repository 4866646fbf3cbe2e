"""The published shapes of the sparse encoder-decoder, as fields of its config.

Every function is a classmethod of `SparseSeq2SeqConfig`; keywords change or add fields.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.encoder_decoder.config import fields_of_stacks
from hf_efficient_attn.patterns.bands import band_of_window
from hf_efficient_attn.patterns.big_bird import bigbird

Config = TypeVar("Config")

LED_SIZES: dict[str, dict[str, int]] = {
    "base": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "encoder_layers": 6,
        "decoder_layers": 6,
    },
    "large": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "encoder_layers": 12,
        "decoder_layers": 12,
    },
}
VANILLA_SIZES: dict[str, dict[str, Any]] = {
    "base": {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8},
    "big": {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
}
# of BART and Pegasus
DROPOUT = {"embedding_dropout": 0.1, "hidden_dropout": 0.1}
VANILLA_DROPOUT = {"base": 0.1, "big": 0.3}


def led(cls: type[Config], size: str = "base", attention_window: int | Sequence[int] = 1024, **fields: Any) -> Config:
    """Return LED: BART's layout with windows in the encoder, and its first token global.

    Args:
        size: "base" (6 + 6 layers of 768) or "large" (12 + 12 layers of 1,024).
        attention_window: how many source tokens a source token reads around itself, both sides together, an even
            number; a list gives one per encoder layer.

    Source: Beltagy et al. (arXiv:2004.05150), section 7; position tables of 16,384 and 1,024 rows as released.
    """
    _check_size(size, LED_SIZES)
    is_per_layer = isinstance(attention_window, list | tuple)
    patterns = [band_of_window(window) for window in (attention_window if is_per_layer else [attention_window])]
    preset: dict[str, Any] = {
        **LED_SIZES[size],
        **DROPOUT,
        "attention_pattern": patterns if is_per_layer else patterns[0],
        "global_tokens": "first",
        "global_projections": True,
        "max_position_embeddings": 16_384,
        "lm_head_bias": True,
        "sep_token_id": 2,
    }
    return cls(**{**preset, **fields_of_stacks(fields)})


def bigbird_pegasus(
    cls: type[Config],
    block_tokens: int = 64,
    num_random_blocks: int = 3,
    plan: str = "authors",
    seed: int = 0,
    **fields: Any,
) -> Config:
    """Return BigBird-Pegasus large: Pegasus' pre-norm layout without attention biases, BigBird-ITC in the encoder.

    Args:
        plan: of the random blocks: "authors", "transformers" or "seeded"; see `patterns.bigbird`.
        seed: of the random blocks; 0 is the authors'.

    Source: Zaheer et al. (arXiv:2007.14062), section 4.1, and the fields of transformers' BigBirdPegasusConfig.
    """
    preset: dict[str, Any] = {
        **DROPOUT,
        "vocab_size": 96_103,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "encoder_layers": 16,
        "decoder_layers": 16,
        "num_attention_heads": 16,
        "attention_pattern": bigbird(block_tokens, num_random_blocks, seed, plan),
        "hidden_act": "gelu_new",
        "attention_bias": False,
        "attention_output_bias": False,
        "norm_position": "pre",
        "embedding_norm": False,
        "max_position_embeddings": 4096,
        "max_target_position_embeddings": 4096,
        "scale_embedding": True,
        "lm_head_bias": True,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "decoder_start_token_id": 2,
    }
    return cls(**{**preset, **fields_of_stacks(fields)})


def vanilla(cls: type[Config], size: str = "base", **fields: Any) -> Config:
    """Return the original Transformer: full attention, post-norm, interleaved sinusoids, one shared scaled embedding.

    Attention weights and inner MLP activations are not dropped, as in the paper. Biases, on which the paper is silent,
    are those of `torch.nn.Transformer`; there is no norm after the stacks. Matrices are initialised by Glorot's uniform
    rule, the embedding with unit variance after scaling.

    Args:
        size: "base" (width 512, 8 heads, dropout 0.1) or "big" (width 1,024, 16 heads, dropout 0.3).

    Source: Vaswani et al. (arXiv:1706.03762), sections 3 and 5, table 3.
    """
    _check_size(size, VANILLA_SIZES)
    fields = {**VANILLA_SIZES[size], **fields}
    preset: dict[str, Any] = {
        "vocab_size": 37_000,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "hidden_act": "relu",
        "embedding_norm": False,
        "position_embedding_type": "sinusoidal",
        "scale_embedding": True,
        "embedding_init_std": fields["hidden_size"] ** -0.5,
        "matrix_init": "glorot",
        **dict.fromkeys(DROPOUT, VANILLA_DROPOUT[size]),
        "label_smoothing": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }
    return cls(**{**preset, **fields_of_stacks(fields)})


def _check_size(size: str, sizes: dict[str, Any]) -> None:
    if size not in sizes:
        raise ConfigurationError(f"size={shown(size)}; it must be one of: {', '.join(sizes)}.")
