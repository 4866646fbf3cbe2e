"""The encoders that `bench etc`, `star` and `trees` compare: as wide and as deep as each other, without dropout."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from hf_efficient_attn.bench.harness.steps import Step, drawn_states
from hf_efficient_attn.models.bp_transformer.configuration_bp_transformer import BPTransformerConfig
from hf_efficient_attn.models.bp_transformer.modeling_bp_transformer import BPTransformerModel
from hf_efficient_attn.models.etc_transformer.configuration_etc_transformer import EtcTransformerConfig
from hf_efficient_attn.models.etc_transformer.modeling_etc_transformer import EtcTransformerModel
from hf_efficient_attn.models.star_transformer.configuration_star_transformer import StarTransformerConfig
from hf_efficient_attn.models.star_transformer.modeling_star_transformer import StarTransformerModel

ETC, STAR, TREE, DENSE, LSTM = "etc", "star", "tree", "dense", "lstm"
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

    def states(self) -> Tensor:
        """Return embeddings [batch_size, tokens, hidden_size], always the same."""
        return drawn_states(self.batch_size, self.tokens, self.hidden_size, self.dtype, self.device)


class Model(nn.Module):
    """A model of transformers, from embeddings to the last hidden state."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, states: Tensor) -> Tensor:
        return self.model(inputs_embeds=states).last_hidden_state  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM of torch in both directions, each half as wide."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        half = shape.hidden_size // 2
        self.lstm = nn.LSTM(shape.hidden_size, half, shape.layers, batch_first=True, bidirectional=True)

    def forward(self, states: Tensor) -> Tensor:
        return self.lstm(states)[0]  # type: ignore[no-any-return]


def build_encoder(name: str, shape: Shape) -> nn.Module:
    """Return a new encoder: ETC, a star, a tree, transformers' BERT on torch's SDPA, or an LSTM."""
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
    elif name == DENSE:
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        encoder = Model(BertModel(BertConfig(**sizes, **wide), add_pooling_layer=False))
    else:
        encoder = Recurrent(shape)
    return encoder.to(shape.device, getattr(torch, shape.dtype))


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
