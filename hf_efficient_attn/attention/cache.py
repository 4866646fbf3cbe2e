"""A cache that holds only the keys that a pattern can still read: the first tokens, and those of its band."""

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from hf_efficient_attn.attention.cache_layers import Padding, PatternLayer
from hf_efficient_attn.attention.layer_patterns import FIELD, NAME, config_patterns
from hf_efficient_attn.attention.model_parts import DECODER
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.bounds import DecodingReach
from hf_efficient_attn.patterns.pattern import Pattern


class PatternCache(Cache):
    """A cache for `generate` whose size does not grow with the text, for patterns of a band and first tokens.

    `model.generate(..., past_key_values=PatternCache(model.config))` gives the tokens that the default cache gives. A
    layer keeps the keys of the pattern's first tokens, counted from each row's first token that is not padding, and of
    the last `left` tokens. Layers that keep their own attention have the cache that transformers would give them.

    Args:
        config: of a sparsified model that is only a decoder. Layers follow `Band(left, ...)`, `Dilated(left, ...)`, or
            these joined with `GlobalTokens` at the positions 0, 1, 2, ...; also per head, and differently from layer to
            layer.

    Raises:
        ConfigurationError: no pattern, or one that can read other tokens.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        if isinstance(config, torch.nn.Module):
            raise ConfigurationError(f"PatternCache got a {type(config).__name__}, a model: pass model.config.")
        text_config: Any = config.get_text_config(decoder=True) if isinstance(config, PreTrainedConfig) else config
        spec = getattr(text_config, FIELD, None)
        if spec is None and getattr(text_config, "span", None) is not None:
            raise ConfigurationError(
                f"PatternCache is for models with an attention_pattern; the heads of this {type(text_config).__name__} "
                f"have span={shown(text_config.span)}. Call generate without past_key_values: the cache that it makes "
                "itself keeps only what the spans reach."
            )
        if spec is None or text_config._attn_implementation != NAME:
            implementation = getattr(text_config, "_attn_implementation", type(config).__name__)
            raise ConfigurationError(
                "PatternCache needs the config of a model with attention_pattern and "
                f"attn_implementation={shown(NAME)}; "
                f"this has {shown(spec)} and {shown(implementation)}. Call sparsify(model, pattern) first, and pass "
                "model.config."
            )
        if getattr(text_config, "is_encoder_decoder", False):
            raise ConfigurationError(
                "PatternCache is for models that are only a decoder. An encoder-decoder computes its encoder once; use "
                "the default cache."
            )
        self.padding = Padding()
        layers = DynamicCache(config=config).layers
        for layer, readable in enumerate(readable_per_layer(text_config)):
            num_first, left = readable or (0, None)
            if left is not None:
                layers[layer] = PatternLayer(num_first, left, self.padding)
        self.checked_spec = spec
        super().__init__(layers=layers)

    def check(self, config: Any) -> None:
        """Raise ConfigurationError if layers of a model read more than this cache keeps: it was made for another one.

        Args:
            config: of the model that computes; None: not known, and nothing is checked.
        """
        if config is None or torch.compiler.is_compiling():
            return
        text_config = config.get_text_config(decoder=True)
        spec = getattr(text_config, FIELD, None)
        if spec is self.checked_spec:
            return
        wanted = () if spec is None else readable_per_layer(text_config)
        for layer, kept in enumerate(self.layers):
            if isinstance(kept, PatternLayer):
                num_first, left = (wanted[layer] if layer < len(wanted) else None) or (0, None)
                if left is None or left > kept.left or num_first > kept.num_first:
                    reads = "all tokens" if left is None else f"{num_first} first tokens and {left} before a token"
                    raise ConfigurationError(
                        f"This PatternCache keeps {kept.num_first} first tokens and {kept.left} before a token for "
                        f"layer {layer}, but the model's layer reads {reads}. Make a new PatternCache(model.config)."
                    )
        self.checked_spec = spec

    @property
    def max_cache_len(self) -> int:
        """Most tokens that a text may have: -1, any number. Asked by PEFT of caches that are no `DynamicCache`."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of tokens a mask is for, and where they begin: all of them; layers take the last."""
        if self.is_sliding[layer_idx]:
            return super().get_mask_sizes(query_length, layer_idx)  # type: ignore[no-any-return]
        origin = Origin()
        origin.cache = self
        return self.get_seq_length(layer_idx) + query_length, origin


class Origin(int):
    """Where the keys begin, 0; through it the cache is told of the padding and the config, by who makes the mask."""

    cache: PatternCache


def readable_tokens(pattern: Pattern) -> DecodingReach:
    """Return how many first tokens, and how many before itself, a token may read under a causal pattern; None: all.

    Raises:
        ConfigurationError: the pattern can read other tokens.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> from hf_efficient_attn.patterns.global_tokens import GlobalTokens
    >>> readable_tokens((Band(8, 0) | GlobalTokens([0, 1])).causal())
    DecodingReach(num_first=2, left=8)
    """
    reach = pattern.decoding_reach()
    if reach is None:
        other = next((atom for atom in pattern.atoms() if atom.decoding_reach() is None), pattern)
        raise ConfigurationError(
            f"PatternCache holds a band and first tokens, but attention_pattern has {other.to_dict()}. Generate with "
            "the default cache, which holds everything."
        )
    return reach


def readable_per_layer(config: Any) -> tuple[DecodingReach | None, ...]:
    """Return `readable_tokens` of each layer's pattern in the config of a text model; None: the layer's own attention.

    Raises:
        ConfigurationError: a layer can read tokens that no `PatternCache` keeps.
    """
    # a config whose layers read more than the pattern says so
    own_patterns = getattr(config, "readable_patterns", None)
    patterns = config_patterns(getattr(config, FIELD), config, DECODER) if own_patterns is None else own_patterns()
    return tuple(None if pattern is None else readable_tokens(pattern.causal()) for pattern in patterns or ())
