"""A cache that holds only the keys to which a pattern can still attend: the first tokens and the tokens of its band."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_efficient_attn.errors import ConfigurationError, UnsupportedBackendError
from hf_efficient_attn.integration.cache_layers import BlockLayer, Padding, PatternLayer
from hf_efficient_attn.integration.layer_patterns import DECODER, FIELD, NAME, config_patterns
from hf_efficient_attn.integration.names import has_indexer
from hf_efficient_attn.integration.streaming_cache import CACHE, TEXT, StreamingLayer, key_rotations
from hf_efficient_attn.messages import shown, warn_once
from hf_efficient_attn.patterns.pattern import DecodingReach, Pattern

# a shorter message than in eager mode, because a compiler cannot trace the comparison of the layers
OTHER_PATTERN = (
    "This PatternCache was made for another attention_pattern than that of the compiled model. Make a new "
    "PatternCache(model)."
)
# decoders that run a layer several times, each time with a cache layer of its own
LOOPED = ("dory", "hrm_text")


class PatternCache(Cache):
    """A key-value cache for `generate` that stops growing in layers that follow a band and first tokens.

    `model.generate(..., cache=PatternCache(model))` generates the same tokens as the default cache. A layer keeps the
    keys and values of the pattern's first tokens, counted from each example's first token that is not padding, and of
    the last `left` tokens. A forward pass attends to these and to all of its own tokens; after that the cache drops
    all other tokens. Layers that keep their own attention have the cache that transformers would give them, and with
    full attention it grows with the text: `[pattern, None] * 2` bounds two layers of four, and a warning and `repr`
    say so. A layer whose keys other layers use, as in Gemma 4, keeps what any of them attends to. A layer that follows
    `BlockTopK` keeps all keys, and the sum of the keys of each block, by which a new token selects blocks.

    The cache refuses a model that attends to more than it keeps, such as a dense model on "sdpa". Some versions of
    transformers call the argument `past_key_values`, others `cache`.

    `PatternCache(model, positions="cache")` generates texts longer than those the model was trained on (StreamingLLM,
    Xiao et al. 2023). A token's position is then its slot in the cache: each kept key counts as rotated by its slot,
    and the query as rotated by the next slot after them, so that no distance exceeds the size of the cache. A model
    rotates keys before they are cached. Therefore the keys of the first tokens are rotated further, by the number of
    dropped tokens, always starting from the keys as they were cached, so rounding errors do not add up. Once tokens
    have been dropped, no forward pass without this cache computes the same, but the way a text is split into calls
    changes nothing. Layers that keep their own attention keep the positions of the text.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import hf_efficient_attn as hea
    >>> from hf_efficient_attn.patterns import Band, GlobalTokens
    >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32)
    >>> model = hea.sparsify(LlamaForCausalLM(config).eval(), Band(left=12, right=0) | GlobalTokens([0, 1, 2, 3]))
    >>> cache = hea.PatternCache(model, positions="cache")
    >>> text = model.generate(torch.ones(1, 8, dtype=int), cache=cache, max_length=64, eos_token_id=None)
    >>> text.shape[1], cache.layers[0].keys.shape[2]
    (64, 16)
    >>> cache
    PatternCache(2 of 2 layers bounded, layers=[StreamingLayer, StreamingLayer])

    Args:
        config: a sparsified decoder, or its config. Each layer follows `Band(left, ...)` or `Dilated(left, ...)`, with
            or without `GlobalTokens` at the positions 0, 1, 2, ..., also per head; or `BlockTopK`. With
            `positions="cache"` give the model itself, on its device and in evaluation mode: it computes one token,
            which shows whether its keys are rotated only by its `rotary_emb`.
        positions: whether positions count tokens of the "text" or slots of the "cache".

    Attributes:
        layers: one for each layer of the model. `PatternLayer`: keys and values of the first `num_first` tokens and of
            the last `left`, and how many tokens it has seen. `StreamingLayer` (`positions="cache"`): the same, and how
            keys are rotated. `BlockLayer` (`BlockTopK`): all keys and values, and the sum of the keys of each block.
            A layer of transformers where the model's layer keeps its own attention.
        padding: the number of padding tokens at the start of each example, for all layers.
        checked_spec: the `attention_pattern` for which this cache was made.
        rope: the model's rotary parameters, with `positions="cache"`.

    Raises:
        ConfigurationError: the model has no pattern, or one that can attend to other tokens; with `positions="cache"`
            also a model without RoPE, or with RoPE frequencies that depend on the length.
    """

    def __init__(self, config: PreTrainedConfig | torch.nn.Module, positions: str = TEXT) -> None:
        model: Any = config
        if positions not in (TEXT, CACHE):
            raise ConfigurationError(f"positions={shown(positions)}; it must be {shown(TEXT)} or {shown(CACHE)}.")
        if positions == CACHE or isinstance(model, torch.nn.Module):
            config = config_of(model)
        text_config = checked_text_config(config)
        self.padding = Padding()
        layers = DynamicCache(config=config).layers  # type: ignore[arg-type]
        readable = readable_per_layer(text_config)
        rotations = {}
        if positions == CACHE and key_sources(text_config, len(readable)):
            raise ConfigurationError(
                f'positions="cache", but layers of this {type(text_config).__name__} use the keys of layers below, '
                "which have been rotated for those. Use PatternCache(model)."
            )
        if positions == CACHE:
            with_first = [layer for layer, kept in enumerate(readable) if kept and kept[0] and kept[1] is not None]
            rotations = key_rotations(model, text_config, with_first)
        for layer, pattern in enumerate(patterns_of(text_config)):
            if layer >= len(layers) or type(layers[layer]) not in (DynamicLayer, DynamicSlidingWindowLayer):
                # the layer uses the keys of a layer below, or has linear attention
                continue
            num_first, left = readable[layer] or (0, None)
            if layer in rotations and left is not None:
                layers[layer] = StreamingLayer(num_first, left, self.padding, rotations[layer])
            elif left is not None:
                layers[layer] = PatternLayer(num_first, left, self.padding)
            elif pattern is not None and pattern.chooses_by_content:
                layers[layer] = BlockLayer(pattern.block_tokens, self.padding)
        self.rope = rope_of(text_config) if positions == CACHE else None
        self.checked_spec = getattr(text_config, FIELD)
        # made here, because torch 2.11 cannot trace its construction
        self.origin = Origin()
        self.origin.cache = self
        # whether the mask function of "efficient" has checked this call of a model
        self.is_followed = False
        super().__init__(layers=layers)
        # layers that grow unexpectedly; a BlockLayer always does
        growing = [layer for layer, kept in enumerate(layers) if not (is_bounded(kept) or isinstance(kept, BlockLayer))]
        num_bounded = sum(map(is_bounded, layers))
        if growing and num_bounded:
            warn_once(
                f"This PatternCache bounds {num_bounded} of {len(layers)} layers. The others, such as layer "
                f"{growing[0]}, attend to the whole text and keep all of its keys: memory grows with the text."
            )

    def __repr__(self) -> str:
        num_bounded = sum(map(is_bounded, self.layers))
        return f"{type(self).__name__}({num_bounded} of {len(self.layers)} layers bounded, layers={self.layers})"

    def follow(self, config: Any, is_token: Tensor | None) -> None:
        """Check the config of the model that is about to compute on "efficient", and record its padding.

        Args:
            config: as for `check`.
            is_token: the padding mask of the keys, bool [batch, tokens]; None: there is no padding.

        Raises:
            ConfigurationError: layers of the model attend to more than this cache keeps.
            InputError: masked tokens follow unmasked ones.
        """
        self.check(config)
        self.padding.note(is_token)
        self.is_followed = True

    def check(self, config: Any) -> None:
        """Raise ConfigurationError if layers of a model attend to more than this cache keeps.

        Args:
            config: the config of the model that computes; None: it is unknown, and nothing is checked.
        """
        if config is None:
            return
        text_config = config.get_text_config(decoder=True)
        spec = getattr(text_config, FIELD, None)
        if torch.compiler.is_compiling():
            if spec is not self.checked_spec and spec != self.checked_spec:
                raise ConfigurationError(OTHER_PATTERN)
            return
        if self.rope is not None and self.rope != rope_of(text_config):
            raise ConfigurationError(
                f'This PatternCache(positions="cache") was made for a model with the RoPE {shown(self.rope)}, but '
                f"this model has {shown(rope_of(text_config))}. Make a new one from this model."
            )
        if spec is self.checked_spec:
            return
        wanted = () if spec is None else readable_per_layer(text_config)
        if len(wanted) > len(self.layers):
            raise ConfigurationError(
                f"This PatternCache has {len(self.layers)} layers, but the model has {len(wanted)}. Make a new "
                "PatternCache(model)."
            )
        for layer, kept in enumerate(self.layers):
            if isinstance(kept, PatternLayer):
                num_first, left = (wanted[layer] if layer < len(wanted) else None) or (0, None)
                if left is None or left > kept.left or num_first > kept.num_first:
                    reads = (
                        "all tokens"
                        if left is None
                        else f"the first {num_first} tokens and the {left} before the query"
                    )
                    raise ConfigurationError(
                        f"In layer {layer}, this PatternCache keeps the first {kept.num_first} tokens and the "
                        f"{kept.left} before the query, but the model attends to {reads}. Make a new "
                        "PatternCache(model)."
                    )
        self.checked_spec = spec

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the kept keys and values of a layer with the new ones appended, [batch, heads, kept + new, head_dim].

        Raises:
            UnsupportedBackendError: tokens have been dropped, and the attention that calls does not know about it.
        """
        layer = self.layers[layer_idx]
        if not self.is_followed and isinstance(layer, PatternLayer) and layer.has_dropped:
            raise UnsupportedBackendError(
                f"This PatternCache has seen {layer.get_seq_length()} tokens in layer {layer_idx} and kept only those "
                f"of a pattern. The model that uses it now does not have attn_implementation={shown(NAME)}, or got a "
                "mask matrix, and would treat the kept tokens as the whole text. Use another cache for a model "
                "without a pattern; call the model of this cache with a padding mask or without a mask."
            )
        if layer_idx == len(self.layers) - 1:
            # reset here too, because a model that gets its mask as a matrix does not call get_mask_sizes
            self.is_followed = False
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.is_followed = False

    @property
    def max_cache_len(self) -> int:
        """The maximum length of a text in tokens; -1: unlimited. PEFT uses it if a cache is not a `DynamicCache`."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the length of the mask and the position of its first key: all tokens; layers use the last ones."""
        if self.is_sliding[layer_idx]:
            return super().get_mask_sizes(query_length, layer_idx)  # type: ignore[no-any-return]
        self.is_followed = False
        return self.get_seq_length(layer_idx) + query_length, self.origin


class Origin(int):
    """The position of the first key, 0, with a reference to the cache.

    By this reference the mask function finds the cache, and gives it the padding and the config. It also works in
    compiled programs, which have no forward context.
    """

    cache: PatternCache


def is_bounded(layer: Any) -> bool:
    """Return whether the memory of a cache layer has an upper bound that does not depend on the length of the text."""
    return isinstance(layer, PatternLayer) or not isinstance(layer, DynamicLayer) or layer.is_sliding


def config_of(model: Any) -> Any:
    """Return the config of a model.

    Raises:
        ConfigurationError: the model has none.
    """
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise ConfigurationError(
            f'PatternCache got a {type(model).__name__}. Pass the model: positions="cache" rotates keys with its '
            'rotary_emb. With positions="text" the config is enough.'
        )
    return model.config


def checked_text_config(config: Any) -> Any:
    """Return the config of the text model within the config of a model that follows a pattern.

    Raises:
        ConfigurationError: `config` is not a config, has no pattern, or is not the config of a decoder-only model.
    """
    if not isinstance(config, PreTrainedConfig):
        raise ConfigurationError(
            f"PatternCache got {shown(config)}, which is not a config. Pass the model or its config."
        )
    text_config: Any = config.get_text_config(decoder=True)
    spec = getattr(text_config, FIELD, None)
    if spec is None and getattr(text_config, "span", None) is not None:
        raise ConfigurationError(
            f"PatternCache is for models with an attention_pattern; the heads of this {type(text_config).__name__} "
            f"have span={shown(text_config.span)}. Call generate without a cache: it then makes one that keeps only "
            "the tokens within the spans."
        )
    if spec is None and has_indexer(text_config):
        raise ConfigurationError(
            f"PatternCache is for models with an attention_pattern; the indexers of this {type(text_config).__name__} "
            "select among all keys. Call generate without a cache: it then makes one that also keeps the keys of the "
            "indexers."
        )
    if spec is None or text_config._attn_implementation != NAME:
        raise ConfigurationError(
            "PatternCache needs the config of a model with attention_pattern and "
            f"attn_implementation={shown(NAME)}; this {type(text_config).__name__} has {shown(spec)} and "
            f"{shown(text_config._attn_implementation)}. Call sparsify(model, pattern) first, and "
            "pass the model."
        )
    if getattr(text_config, "is_encoder_decoder", False):
        raise ConfigurationError(
            "PatternCache is for decoder-only models, but this model is an encoder-decoder. Use the default cache."
        )
    first, *others = patterns_of(text_config) if text_config.model_type in LOOPED else (None,)
    if any(pattern != first for pattern in others):
        raise ConfigurationError(
            f"{text_config.model_type} runs its layers several times, and this attention_pattern differs by layer: "
            f"{shown(spec)}. Use one pattern for all layers, or generate with the default cache."
        )
    return text_config


def rope_of(config: Any) -> tuple[Any, Any]:
    """Return what determines the angles of a model's keys: its model type and the parameters of its RoPE."""
    return config.model_type, getattr(config, "rope_parameters", None)


def readable_tokens(pattern: Pattern) -> DecodingReach:
    """Return how many first tokens, and how many before itself (None: all), a token attends to in a causal pattern.

    Raises:
        ConfigurationError: the pattern also allows other tokens.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> from hf_efficient_attn.patterns.global_tokens import GlobalTokens
    >>> readable_tokens((Band(8, 0) | GlobalTokens([0, 1])).causal())
    DecodingReach(num_first=2, left=8)
    """
    reach = pattern.decoding_reach()
    if reach is None:
        other = next((atom for atom in pattern.atoms() if atom.decoding_reach() is None), pattern)
        raise ConfigurationError(
            f"PatternCache can keep only a band and first tokens, but attention_pattern has {shown(other)}. Generate "
            "with the default cache, which keeps all tokens."
        )
    return reach


def readable_per_layer(config: Any) -> tuple[DecodingReach | None, ...]:
    """Return `readable_tokens` of each layer's pattern in the config of a text model; None: the layer's own attention.

    A layer whose keys other layers use, as in Gemma 3n and Gemma 4, keeps what any of them attends to.

    Raises:
        ConfigurationError: a layer can attend to tokens that no `PatternCache` keeps.
    """
    patterns = patterns_of(config)
    reaches = [
        None if pattern is None or pattern.chooses_by_content else readable_tokens(pattern.causal())
        for pattern in patterns
    ]
    for layer, source in key_sources(config, len(patterns)).items():
        own, kept = reaches[layer], reaches[source]
        if own is None or kept is None:
            if any(each is not None and each.chooses_by_content for each in (patterns[layer], patterns[source])):
                raise ConfigurationError(
                    f"Layer {layer} uses the keys of layer {source}, and a pattern that selects blocks needs keys of "
                    "its own. Generate with the default cache."
                )
            reaches[source] = None
        else:
            left = None if own.left is None or kept.left is None else max(own.left, kept.left)
            reaches[source] = DecodingReach(max(own.num_first, kept.num_first), left)
    return tuple(reaches)


def key_sources(config: Any, num_layers: int) -> dict[int, int]:
    """Return {layer: the layer below whose keys it uses}, by the fields of Gemma 3n and Gemma 4."""
    first = num_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    types = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    return {
        layer: max(below for below in range(first) if types[below] == types[layer])
        for layer in range(first, num_layers)
    }


def patterns_of(config: Any) -> Sequence[Any]:
    """Return the pattern of each layer in the config of a text model; None: the layer's own attention."""
    # configs of families whose layers attend to more than the pattern have this method
    own_patterns = getattr(config, "readable_patterns", None)
    return (config_patterns(getattr(config, FIELD), config, DECODER) if own_patterns is None else own_patterns()) or ()
