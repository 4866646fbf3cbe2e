"""The encoders that etc.py, star.py and trees.py compare: equally wide and deep, without dropout."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from contest import Built, Contest, drawn_states, forward_case, training_case
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.bp_transformer.configuration_bp_transformer import BPTransformerConfig
from hf_efficient_attn.models.bp_transformer.modeling_bp_transformer import BPTransformerModel
from hf_efficient_attn.models.etc_transformer.configuration_etc_transformer import EtcTransformerConfig
from hf_efficient_attn.models.etc_transformer.modeling_etc_transformer import EtcTransformerModel
from hf_efficient_attn.models.star_transformer.configuration_star_transformer import StarTransformerConfig
from hf_efficient_attn.models.star_transformer.modeling_star_transformer import StarTransformerModel

ETC, STAR, TREE, DENSE, LSTM = "etc", "star", "tree", "dense", "lstm"
SEED = 0
# a small vocabulary, because the encoder is measured and not its embedding
VOCAB_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """What the compared encoders have in common; the number of layers is also the number of updates of a star.

    Attributes:
        num_nodes: k, how many nodes of each size and side a tree's tokens attend to.
        local_radius: how many long tokens a long token of ETC attends to on each side.
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


def build(name: str, shape: Shape) -> Built:
    """Return a new encoder with its timed cases: forward, and the gradients of all parameters."""
    encoder, states = build_encoder(name, shape), shape.states()

    def step() -> None:
        encoder(states).float().square().mean().backward()
        encoder.zero_grad()

    return Built({"forward": forward_case(encoder, states), "training": training_case(encoder, step)})


def check(settings: dict[str, Any]) -> None:
    """Raise InputError if heads do not divide the width, or with an LSTM half of it, the width of one direction."""
    directions = 2 if LSTM in settings["encoders"] else 1
    if settings["hidden_size"] % (directions * settings["heads"]):
        raise InputError(
            f"hidden_size={settings['hidden_size']} must be a multiple of {directions * settings['heads']}: heads "
            f"divide it{', and the directions of the LSTM' if directions > 1 else ''}."
        )


def contest(script: str, title: str, encoders: Mapping[str, str], lengths: tuple[int, ...], **sizes: Any) -> Contest:
    """Return the contest of encoders, {name: description}; the first one is ours.

    Args:
        sizes: {option: (default, what it counts)}, in addition to layers, width and heads; fields of `Shape`.
    """
    common = {"layers": (4, "layers"), "hidden_size": (256, "width"), "heads": (8, "heads")}
    return Contest(
        script,
        title=f"{title}: {{layers}} layers, width {{hidden_size}}, {{heads}} heads, {{dtype}}, batch {{batch_size}}",
        kind="encoder",
        contestants=encoders,
        shape=Shape,
        build=build,
        lengths=lengths,
        memory_lengths=lengths,
        counts={"batch_size": (1, "texts"), **common, **sizes},
        against=tuple(name for name in (DENSE, LSTM) if name in encoders),
        check=check,
        about="From embeddings to the last hidden state, without dropout; training step: forward and backward.",
        beyond="weights and embeddings",
    )
