"""The encoders that `bench etc`, `images`, `star` and `trees` compare: equally wide and deep, without dropout."""

from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, Dinov2Config, Dinov2Model

from hf_efficient_attn.attention.sparsify import sparsify
from hf_efficient_attn.bench.harness.steps import Step, drawn_states
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.bp_transformer.configuration_bp_transformer import BPTransformerConfig
from hf_efficient_attn.models.bp_transformer.modeling_bp_transformer import BPTransformerModel
from hf_efficient_attn.models.etc_transformer.configuration_etc_transformer import EtcTransformerConfig
from hf_efficient_attn.models.etc_transformer.modeling_etc_transformer import EtcTransformerModel
from hf_efficient_attn.models.star_transformer.configuration_star_transformer import StarTransformerConfig
from hf_efficient_attn.models.star_transformer.modeling_star_transformer import StarTransformerModel
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.grid import Grid

ETC, STAR, TREE, DENSE, LSTM = "etc", "star", "tree", "dense", "lstm"
# of images
NEIGHBOURHOOD, DINOV2 = "neighbourhood", "dinov2"
SEED = 0
# a small vocabulary: the encoder is measured, not a table of tokens
VOCAB_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """What the compared encoders have in common: the updates of a star are layers of the others.

    Attributes:
        num_nodes: k, how many nodes of each size and side a tree's tokens read.
        local_radius: how many long tokens a long token of ETC reads on each side.
        chunk_tokens: long tokens for each global token of ETC.
        patch_pixels: pixels of a patch's side, where a token is a patch of a square image; 0: tokens are of texts.
        grid_radius: how many patches a patch reads on each side along each axis.
    """

    tokens: int
    batch_size: int
    layers: int
    hidden_size: int
    heads: int
    dtype: str
    device: str
    num_nodes: int = 4
    local_radius: int = 84
    chunk_tokens: int = 32
    patch_pixels: int = 0
    grid_radius: int = 3

    def __post_init__(self) -> None:
        if self.patch_pixels and self.patches_of_side**2 != self.tokens:
            raise InputError(
                f"lengths={self.tokens}: a square image has as many patches as a square number, such as "
                f"{self.patches_of_side**2} or {(self.patches_of_side + 1) ** 2}."
            )

    @property
    def patches_of_side(self) -> int:
        """How many patches lie along a side of an image."""
        return isqrt(self.tokens)

    def states(self) -> Tensor:
        """Return embeddings [batch_size, tokens, hidden_size], or an image's pixels [batch_size, 3, pixels, pixels].

        They are always the same.
        """
        if self.patch_pixels:
            side = self.patch_pixels * self.patches_of_side
            pixels = drawn_states(self.batch_size, 3 * side, side, self.dtype, self.device)
            return pixels.unflatten(1, (3, side))
        return drawn_states(self.batch_size, self.tokens, self.hidden_size, self.dtype, self.device)


class Model(nn.Module):
    """A model of transformers, from what it reads, embeddings or pixels, to the last hidden state."""

    def __init__(self, model: Any, read: str = "inputs_embeds") -> None:
        super().__init__()
        self.model, self.read = model, read

    def forward(self, states: Tensor) -> Tensor:
        return self.model(**{self.read: states}).last_hidden_state  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM of torch in both directions, each half as wide."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        half = shape.hidden_size // 2
        self.lstm = nn.LSTM(shape.hidden_size, half, shape.layers, batch_first=True, bidirectional=True)

    def forward(self, states: Tensor) -> Tensor:
        return self.lstm(states)[0]  # type: ignore[no-any-return]


def build_encoder(name: str, shape: Shape) -> nn.Module:
    """Return a new encoder: ETC, a star, a tree, transformers' BERT or DINOv2 on torch's SDPA, or an LSTM."""
    torch.manual_seed(SEED)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.tokens,
    }
    wide: dict[str, Any] = {"intermediate_size": 4 * shape.hidden_size}
    if name == ETC:
        reads: dict[str, Any] = {"local_radius": shape.local_radius, "chunk_tokens": shape.chunk_tokens}
        encoder: nn.Module = Model(EtcTransformerModel(EtcTransformerConfig(**sizes, **wide, **reads)))
    elif name == STAR:
        encoder = Model(StarTransformerModel(StarTransformerConfig(**sizes)))
    elif name == TREE:
        encoder = Model(BPTransformerModel(BPTransformerConfig(**sizes, **wide, num_nodes=shape.num_nodes)))
    elif name in (DINOV2, NEIGHBOURHOOD):
        encoder = Model(_image_model(shape, is_sparse=name == NEIGHBOURHOOD), "pixel_values")
    elif name == DENSE:
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        encoder = Model(BertModel(BertConfig(**sizes, **wide), add_pooling_layer=False))
    else:
        encoder = Recurrent(shape)
    return encoder.to(shape.device, getattr(torch, shape.dtype))


def _image_model(shape: Shape, is_sparse: bool) -> Any:
    """Return a DINOv2 for images of one size, whose patches read all or their neighbourhood."""
    config = Dinov2Config(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        patch_size=shape.patch_pixels,
        image_size=shape.patch_pixels * shape.patches_of_side,
    )
    model = Dinov2Model(config)
    near = Band(shape.grid_radius, shape.grid_radius)
    return sparsify(model, Grid([shape.patches_of_side] * 2, [near, near], prefix_tokens=1)) if is_sparse else model


def training_step(encoder: nn.Module, states: Tensor) -> Step:
    """Return a function that computes the gradients of all parameters, and frees them."""

    def step() -> None:
        encoder.train()(states).float().square().mean().backward()
        encoder.zero_grad()

    return step


def build_training_step(name: str, shape: dict[str, Any]) -> Step:
    """Return the training step of a new encoder; arguments of JSON types, `shape` has the fields of `Shape`."""
    sizes = Shape(**shape)
    return training_step(build_encoder(name, sizes), sizes.states())
