"""What one attention layer of a model asks the engine for, as far as it does not depend on the text."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from hf_efficient_attn.attention.direction import is_named_cross
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.model_parts import DECODER, part_of
from hf_efficient_attn.attention.select import AUTO
from hf_efficient_attn.layout.score_terms import Label
from hf_efficient_attn.layout.selected_keys import ChosenKeys


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
        backend: which backend it asks for.
        notes: what this leaves out, in sentences.
        chosen: the keys that it chooses by what tokens say, as tensors on the device "meta"; None: it chooses none.
        most_keys: how many of the chosen keys a query reads at most; with `chosen` None, how many an indexer chooses.
        beside: what other heads of the layer ask for, where some do something else.
        sends_more: whether processes that share a text exchange more in the layer than its pattern needs.
    """

    followed: LayerPattern
    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    config: Any
    part: str = "encoder"
    is_causal: bool = False
    is_cross: bool = False
    layer: int | None = None
    labels: tuple[Label, ...] = ()
    fixed_labels: tuple[Label, ...] = ()
    softcap: float | None = None
    has_sinks: bool = False
    has_bias: bool = False
    backend: str = AUTO
    notes: tuple[str, ...] = ()
    chosen: ChosenKeys | None = field(default=None, compare=False)
    most_keys: int | None = None
    beside: "LayerRequest | None" = None
    sends_more: bool = False

    @property
    def alike(self) -> "LayerRequest":
        """What is equal in layers that compute alike: all but their index, on which blocks depend that are drawn."""
        beside = None if self.beside is None else self.beside.alike
        return replace(self, layer=None, followed=replace(self.followed, layer=0), beside=beside)


def asked_by(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, followed: LayerPattern, options: dict[str, Any]
) -> LayerRequest:
    """Return what a module of transformers asks for; the arguments are those of the attention function."""
    part, config = part_of(module), getattr(module, "config", None)
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
        sends_more=getattr(config, "sends_more", False),
    )
