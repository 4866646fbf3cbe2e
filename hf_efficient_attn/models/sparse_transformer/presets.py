"""The published shapes of the sparse Transformer, as fields of its config.

Every function is a classmethod of `SparseTransformerConfig`; keywords change or add fields.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.algebra import PerHead
from hf_efficient_attn.patterns.bands import Band, Dilated, Strided, band_of_window
from hf_efficient_attn.patterns.big_bird import bigbird
from hf_efficient_attn.patterns.blocks import BlockLocal
from hf_efficient_attn.patterns.pattern import Pattern

Config = TypeVar("Config")

CAUSAL: dict[str, Any] = {
    "is_causal": True,
    "norm_position": "pre",
    "embedding_norm": False,
    "position_embedding_type": "rope",
    "lm_head_transform": False,
    "lm_head_bias": False,
}


# of RoBERTa and BERT
DROPOUT = dict.fromkeys(("embedding_dropout", "hidden_dropout", "attention_dropout", "classifier_dropout"), 0.1)


def longformer(
    cls: type[Config],
    attention_window: int | Sequence[int] = 512,
    attention_dilation: int | Sequence[int] | Sequence[Sequence[int]] = 1,
    num_dilated_heads: int | None = None,
    is_causal: bool = False,
    **fields: Any,
) -> Config:
    """Return Longformer-base: RoBERTa's layout, a window per layer, global tokens with projections of their own.

    Args:
        attention_window: keys that a query reads around itself, both sides together, an even number, or one per layer.
        attention_dilation: step between them, 1 = none; a list gives one per layer, or a list with one per head.
        num_dilated_heads: how many of the last heads of a layer are dilated, if it has one step; None: all.
        is_causal: a language model: the window's left half, no global tokens unless asked for, pre-norm, rotary.

    Source: Beltagy et al. (arXiv:2004.05150), section 3, and the sizes of longformer-base-4096.
    """
    preset: dict[str, Any] = {
        **({} if is_causal else DROPOUT),
        "vocab_size": 50_265,
        "max_position_embeddings": 4096,
        "position_offset": 2,
        "type_vocab_size": 1,
        "norm_eps": 1e-5,
        "global_tokens": "auto",
        "global_projections": True,
        "classifier_head": "dense",
        "classifier_pooling": "first",
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "sep_token_id": 2,
    }
    if is_causal:
        preset |= {**CAUSAL, "global_tokens": None, "global_projections": False, "classifier_pooling": None}
        preset |= {"position_offset": 0}
    fields = {**preset, **fields}
    num_layers, num_heads = fields.get("num_hidden_layers", 12), fields.get("num_attention_heads", 12)
    windows = _per_layer("attention_window", attention_window, num_layers)
    steps = _per_layer("attention_dilation", attention_dilation, num_layers)
    num_dilated = num_heads if num_dilated_heads is None else num_dilated_heads
    if type(num_dilated) is not int or not 0 <= num_dilated <= num_heads:
        raise ConfigurationError(
            f"num_dilated_heads={shown(num_dilated_heads)}; it must be None or 0 to {num_heads}, the number of heads."
        )
    patterns = []
    for window, step in zip(windows, steps, strict=True):
        is_single = isinstance(step, int)
        head_steps = [1] * (num_heads - num_dilated) + [step] * num_dilated if is_single else list(step)
        patterns.append(_window(band_of_window(window).left, head_steps, num_heads))
    return cls(**{"attention_pattern": patterns, **fields})


def _window(side: int, steps: Sequence[int], num_heads: int) -> Pattern:
    """Return windows of `side` keys on each side, spaced by each head's step, so that they reach that much farther."""
    if len(steps) != num_heads or any(type(step) is not int or step < 1 for step in steps):
        raise ConfigurationError(
            f"attention_dilation has the steps {shown(list(steps))} for the {num_heads} heads of a layer; give one "
            "step from 1 for all of them, or one for each."
        )
    heads = [Band(side, side) if step == 1 else Dilated(side * step, side * step, step) for step in steps]
    return heads[0] if len(set(heads)) == 1 else PerHead(heads)


def _per_layer(name: str, value: Any, num_layers: int) -> list[Any]:
    values = list(value) if isinstance(value, list | tuple) else [value] * num_layers
    if len(values) != num_layers:
        raise ConfigurationError(f"{name} lists {len(values)} values for {num_layers} layers; give one each.")
    return values


def longformer_char_lm(cls: type[Config], size: str = "small", phase: int = 1, **fields: Any) -> Config:
    """Return Longformer's character language model: pre-norm, relative sinusoids, growing windows, two dilated heads.

    Args:
        size: "small" (12 layers, 41M parameters) or "large" (30 layers, 102M), both of width 512 with 8 heads.
        phase: 1 to 5. Each doubles the windows; training starts phase p from the weights of p - 1.

    The paper's table garbles the windows. We read it as 32 tokens at the bottom to 512 at the top in phase 1, 512 to
    8,192 in phase 5, in powers of two; where they do not divide the layers evenly, the larger ones get more, so that
    the small model's average is 229, to match the paper's control with equal windows of 230. The table's dilations 0 to
    3 count gaps: steps of 1 to 4. Source: Beltagy et al. (arXiv:2004.05150), section 4 and appendix B.
    """
    if size not in ("small", "large") or phase not in range(1, 6):
        raise ConfigurationError(f"size={shown(size)}, phase={phase}: sizes are 'small' and 'large', phases 1 to 5.")
    num_layers = fields.get("num_hidden_layers", 12 if size == "small" else 30)
    num_heads = fields.get("num_attention_heads", 8)
    # layers of the table: 0-5, 6-7, 8-9, 10-11 of 12, and 0-14, 15-19, 20-24, 25-29 of 30
    borders = (1 / 2, 2 / 3, 5 / 6)
    windows = [32 * 2 ** (power + phase - 1) for power in range(5) for _ in range((num_layers + power) // 5)]
    patterns = []
    for layer, window in enumerate(windows):
        step = 1 + sum(layer >= round(border * num_layers) for border in borders)
        patterns.append(_window(window, [1] * (num_heads - 2) + [step] * 2, num_heads).causal())
    preset = {
        "vocab_size": 256,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "is_causal": True,
        "norm_position": "pre",
        "norm_eps": 1e-5,
        "embedding_norm": False,
        "position_embedding_type": "relative",
        "max_position_embeddings": 32_256,
        "attention_bias": False,
        "attention_output_bias": False,
        "lm_head_transform": False,
        "lm_head_bias": True,
        "embedding_dropout": 0.2 if size == "small" else 0.4,
        "hidden_dropout": 0.2 if size == "small" else 0.4,
        "pad_token_id": None,
    }
    return cls(**{"attention_pattern": patterns, **preset, **fields})


def bigbird_itc(
    cls: type[Config],
    block_tokens: int = 64,
    num_random_blocks: int = 3,
    plan: str = "authors",
    seed: int = 0,
    is_causal: bool = False,
    **fields: Any,
) -> Config:
    """Return BigBird-ITC base: three blocks around the query, the first and the last block global, and random blocks.

    Args:
        plan: of the random blocks: "authors", "transformers" or "seeded"; see `patterns.bigbird`. The causal form,
            which no paper has, is always seeded.
        seed: of the random blocks; 0 is the authors'.

    Source: Zaheer et al. (arXiv:2007.14062), sections 2 and E; sizes of bigbird-roberta-base.
    """
    preset: dict[str, Any] = {
        **({} if is_causal else DROPOUT),
        "vocab_size": 50_358,
        "hidden_act": "gelu_new",
        "type_vocab_size": 2,
        "max_position_embeddings": 4096,
        "classifier_head": "dense",
        "classifier_activation": "gelu_new",
        "classifier_pooling": "first",
        "question_answering_head": "residual_mlp",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sep_token_id": 66,
    }
    if is_causal:
        preset |= {**CAUSAL, "type_vocab_size": 0, "classifier_pooling": None}
    pattern = bigbird(block_tokens, num_random_blocks, seed, "seeded" if is_causal else plan, is_causal)
    return cls(**{"attention_pattern": pattern, **preset, **fields})


def block_local(cls: type[Config], block_tokens: int = 512, is_causal: bool = False, **fields: Any) -> Config:
    """Return a model whose tokens read their own block; "Efficient Transformers" survey (arXiv:2106.04554), 4.1.1."""
    return cls(**{"attention_pattern": BlockLocal(block_tokens), **(CAUSAL if is_causal else {}), **fields})


def strided(cls: type[Config], stride: int = 128, is_causal: bool = True, **fields: Any) -> Config:
    """Return the strided Sparse Transformer: the last `stride` tokens, and every `stride`-th of all.

    Every head reads both (the "merged" form). Source: Child et al. (arXiv:1904.10509), section 4.2.
    """
    pattern = Band(stride, stride) | Strided(stride)
    return cls(**{"attention_pattern": pattern, **(CAUSAL if is_causal else {}), **fields})


def sliding(
    cls: type[Config], left: int = 256, right: int | None = None, is_causal: bool = False, **fields: Any
) -> Config:
    """Return a model whose tokens read `left` tokens before and `right` (default: as many) after themselves."""
    pattern = Band(left, 0 if is_causal else left if right is None else right)
    return cls(**{"attention_pattern": pattern, **(CAUSAL if is_causal else {}), **fields})
