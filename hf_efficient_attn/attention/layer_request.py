"""What one attention layer of a model asks the engine for, as far as it does not depend on the text."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from hf_efficient_attn.attention.direction import is_named_cross
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.model_parts import DECODER, ENCODER, part_of
from hf_efficient_attn.attention.select import AUTO
from hf_efficient_attn.attention.sharded.traffic import HeadNumbers
from hf_efficient_attn.layout.chosen.chosen_keys import ChosenKeys
from hf_efficient_attn.layout.terms import Label


@dataclass(frozen=True)
class LayerRequest:
    """What one attention layer asks for.

    Attributes:
        followed: the pattern of the layer, and its number.
        num_heads, num_key_heads, head_dim, value_dim: of its queries, keys and values.
        config: of the module that asks.
        part: the part of an encoder-decoder.
        is_causal: whether the layer reads the past only, whatever its pattern.
        is_cross: whether it reads another sequence.
        layer: its index; None: the module does not know it.
        labels: of the terms of its scores, with values for each query.
        fixed_labels: of those with the same values for all queries.
        softcap: bound of its scores; None: there is none.
        has_sinks, has_bias: whether it has learned sinks, and whether it adds a matrix to its scores.
        bias_labels: of the terms that it has instead of this matrix where processes share a text.
        backend: which backend it asks for.
        notes: what this leaves out, in sentences.
        chosen: the keys that it chooses by what tokens say, as tensors on the device "meta"; None: it chooses none.
        most_keys: how many of the chosen keys a query reads at most; with `chosen` None, how many an indexer chooses.
        index_dim: the width of the keys of its indexer; None: it has none at work.
        heads: what these heads are called, where others of the layer do something else.
        beside: what these others ask for.
        of_mean: what a token of a head takes, where processes share a text and deal out the heads, for the mean of
            what it may read, if the layer subtracts that; with a pattern or terms that takes as much as attention
            does. None: it does not.
        besides: as `of_mean`, for what it computes beside its attention; None: nothing.
    """

    followed: LayerPattern
    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    config: Any
    part: str = ENCODER
    is_causal: bool = False
    is_cross: bool = False
    layer: int | None = None
    labels: tuple[Label, ...] = ()
    fixed_labels: tuple[Label, ...] = ()
    softcap: float | None = None
    has_sinks: bool = False
    has_bias: bool = False
    bias_labels: tuple[Label, ...] = ()
    backend: str = AUTO
    notes: tuple[str, ...] = ()
    chosen: ChosenKeys | None = None
    most_keys: int | None = None
    index_dim: int | None = None
    heads: str = ""
    beside: "LayerRequest | None" = None
    of_mean: HeadNumbers | None = None
    besides: HeadNumbers | None = None

    @property
    def likeness(self) -> list[Any]:
        """What is equal in layers that compute alike: all but their index, on which blocks depend that are drawn."""
        followed = replace(self.followed, layer=0)
        own = replace(self, layer=None, followed=followed, chosen=None, beside=None)
        chosen = None if self.chosen is None else self.chosen.traits
        return [own, chosen, None if self.beside is None else self.beside.likeness]


def asked_by(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, followed: LayerPattern, options: dict[str, Any]
) -> LayerRequest:
    """Return what a module of transformers asks for; the arguments are those of the attention function."""
    part, numbers_of_mean = part_of(module), getattr(module, "numbers_of_mean", None)
    config = getattr(module, "config", None)
    own_is_causal = followed.is_own and followed.pattern.is_causal
    # a decoder never reads another sequence causally
    is_cross = followed.reads_all and (part == DECODER or is_named_cross(module))
    return LayerRequest(
        followed,
        num_heads=query.shape[1],
        num_key_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        config=config,
        part=part,
        is_causal=followed.is_causal or own_is_causal,
        is_cross=is_cross,
        layer=getattr(module, "layer_idx", None),
        softcap=options.get("softcap"),
        has_sinks=options.get("s_aux") is not None,
        has_bias=options.get("position_bias") is not None,
        bias_labels=getattr(config, "bias_labels", ()),
        of_mean=None if numbers_of_mean is None else numbers_of_mean(),
    )
