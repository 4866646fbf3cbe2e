"""What comes before the first block: token, position and type embeddings, their norm and dropout."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from hf_efficient_attn.attention.sharded.shards import shards_of
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.score_terms import Slope, Term
from hf_efficient_attn.layout.transfer import device_numbers, on_host
from hf_efficient_attn.models.parts.blocks import KeptInFloat32, build_norm
from hf_efficient_attn.models.prologue import PreparedCall

# Axial positions: a table per axis instead of one row per position (arXiv:2001.04451, appendix; Ho et al., 2019).


class AxialPositions(nn.Module):
    """Return the vectors of positions, each the concatenated vectors of its coordinates.

    Position p of a shape (n₁, n₂) has the coordinates (p div n₂, p mod n₂), and so on for more axes. A text may have
    any length up to n₁·n₂. Shapes: positions [B or 1, T] → [B or 1, T, hidden_size].

    Reads from the config: `axial_shape`, `axial_widths`, `axial_norm_std`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.shape, self.std = config.axial_shape, config.axial_norm_std
        # not in an `nn.ParameterList`, whose parameters transformers would not initialise
        for number, (size, width) in enumerate(zip(self.shape, config.axial_widths, strict=True)):
            self.register_parameter(f"axis_{number}", nn.Parameter(torch.empty(size, width)))

    @property
    def axes(self) -> list[nn.Parameter]:
        """The table of each axis."""
        return [getattr(self, f"axis_{number}") for number in range(len(self.shape))]

    @property
    def num_embeddings(self) -> int:
        """The number of positions, the product of the shape."""
        return torch.Size(self.shape).numel()

    def initialize(self) -> None:
        """Initialise the tables with N(0, axial_norm_std²)."""
        for axis in self.axes:
            init.normal_(axis, std=self.std)

    def forward(self, position_ids: Tensor) -> Tensor:
        found, axes = [], self.axes
        for number in range(len(self.shape) - 1, -1, -1):
            # no modulo on the first axis, so that a position beyond the end is an error, not another position
            coordinates = position_ids % self.shape[number] if number else position_ids
            found.append(nn.functional.embedding(coordinates, axes[number]))
            position_ids = position_ids // self.shape[number]
        return torch.cat(found[::-1], -1)


# Positions: sinusoidal, learned, rotary, ALiBi, or none, in one module.
#
# Shapes: B batch, T new tokens, K cached and new tokens, H heads, D head size.


class Positions(nn.Module):
    """Add positions to the embeddings, or return them as arguments for attention.

    Reads from the config: `position_embedding_type` (`sinusoidal`, `scaled_sinusoidal`, `learned`, `rope`, `alibi`,
    `relative`, which attention computes itself, `axial`, see `AxialPositions`, `none`), `hidden_size`,
    `num_attention_heads`, `sinusoid_amplitude`; for `rope` also `rope_parameters`; for `learned` also its number of
    rows, the field that `size_field` names; and, if a config has them, `position_offset` (rows of the learned table
    before that of position 0), `sinusoid_layout` and `rope_theta_per_layer`.
    """

    def __init__(self, config: Any, size_field: str = "max_position_embeddings") -> None:
        super().__init__()
        self.config, self.size_field = config, size_field
        self.kind = config.position_embedding_type
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.table: nn.Module | None = None
        self.offset = getattr(config, "position_offset", 0)
        self.thetas = getattr(config, "rope_theta_per_layer", None)
        self.rotary = RotaryEmbedding(config) if self.kind == "rope" and self.thetas is None else None
        if self.kind == "sinusoidal":
            layout = getattr(config, "sinusoid_layout", "interleaved")
            self.table = SinusoidalPositions(config.hidden_size, config.sinusoid_amplitude, layout=layout)
        elif self.kind == "scaled_sinusoidal":
            self.table = SinusoidalPositions(config.hidden_size, config.hidden_size**-0.5, train_scale=True)
        elif self.kind == "learned":
            self.table = nn.Embedding(getattr(config, size_field) + self.offset, config.hidden_size)
        elif self.kind == "axial":
            self.table, self.size_field = AxialPositions(config), "axial_pos_shape"

    def forward(self, embedded: torch.Tensor, call: PreparedCall) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the embedding with positions added, and keyword arguments for every attention layer.

        Args:
            embedded: [B, T, hidden_size], used instead of the call's embeddings.
            call: its `position_ids` are used; if it has none, positions count the real tokens of a mask [B, K or more],
                or all tokens if there is no such mask. A mask matrix says nothing about positions.

        Raises:
            InputError: a position beyond the end of the learned table.
        """
        tokens, past_tokens, num_keys = call.tokens, call.past_tokens, call.num_keys
        position_ids, attention_mask = call.position_ids, call.attention_mask
        index = torch.arange(tokens, device=embedded.device) + past_tokens
        if self.kind == "alibi" and shards_of(self) is not None:
            # no process of a shared text holds a matrix of all pairs
            slopes = device_numbers(alibi_slopes(self.num_heads), embedded.device, torch.float32)
            return embedded, {"position_terms": (Term(slopes.view(1, -1, 1, 1), Slope()),)}
        if self.kind == "alibi":
            bias = alibi_bias(self.num_heads, index, num_keys).to(embedded.dtype)
            if self.config._attn_implementation == "flex_attention":
                bias = bias.expand(embedded.shape[0], -1, -1, -1)  # flex looks it up by row and does not broadcast
            return embedded, {"position_bias": bias}
        # positions that are counted here never lie beyond the last token
        last = past_tokens + tokens - 1 if position_ids is None and isinstance(past_tokens, int) else None
        if position_ids is None:
            position_ids = index.unsqueeze(0)
            if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
                position_ids = positions_among_real(attention_mask).index_select(1, index)
        self.check_table(position_ids, last)
        if self.rotary is not None:
            return embedded, {"position_embeddings": self.rotary(embedded, position_ids)}
        if self.kind == "rope":
            rotations = {theta: rotation(embedded, position_ids, self.head_dim, theta) for theta in set(self.thetas)}
            return embedded, {"position_embeddings": rotations}
        if self.table is None:
            return embedded, {}
        return embedded + self.table(position_ids + self.offset).to(embedded.dtype), {}

    def check_table(self, position_ids: torch.Tensor, last: int | None = None) -> None:
        """Raise InputError for a position beyond the end of the learned table; not while compiling.

        last: an upper bound of the positions; None: unknown.
        """
        if self.kind not in ("learned", "axial") or torch.compiler.is_compiling():
            return
        size = self.table.num_embeddings - self.offset
        if last is None or last >= size:
            last = int(on_host(position_ids).max())
        if last >= size and self.kind == "axial":
            raise InputError(
                f"The sequence reaches position {last}, but {self.size_field}={list(self.table.shape)} has {size} "
                f"positions. Truncate to {size} tokens, or build a model with longer axes."
            )
        if last >= size and getattr(self.config, "has_one_length", False):
            raise InputError(
                f"The sequence reaches position {last}, but {self.size_field}={size}, and the projections are made "
                f"for this length. Truncate to {size} tokens, or train a model for longer texts."
            )
        if last >= size:
            raise InputError(
                f"The sequence reaches position {last}, but the learned position table has {self.size_field}={size} "
                f"rows. Truncate to {size} tokens, or extend the table with `hf-efficient-attn convert FOLDER "
                f"NEW_FOLDER --{self.size_field.replace('_', '-')} {last + 1}`, which repeats its rows (for sparse "
                "and compressed Transformers, and Reformers). Sinusoids, rotary positions and ALiBi have no limit."
            )


class RotaryEmbedding(KeptInFloat32, LlamaRotaryEmbedding):
    """Llama's rotary positions with frequencies that stay in float32.

    Rounded frequencies would rotate far tokens by wrong angles, off by whole turns. After loading, transformers
    recomputes the frequencies for a class of this name.
    """


class SinusoidalPositions(nn.Module):
    """Return `scale` times sin and cos of the positions; there is no table, so sequences may have any length.

    Vaswani et al. (arXiv:1706.03762) add sinusoids of amplitude 1 to embeddings scaled to unit variance. If embeddings
    are not scaled, a config's `sinusoid_amplitude` is `initializer_range`: the sum is then the same up to a common
    factor, which the first norm removes. With `train_scale` the scale is a parameter that starts at 1/√hidden_size
    (crammed BERT). Shapes: positions [B or 1, T] → [B or 1, T, hidden_size].
    """

    def __init__(
        self, hidden_size: int, scale: float = 1.0, train_scale: bool = False, layout: str = "interleaved"
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.layout = layout
        self.initial_scale = scale
        self.scale = nn.Parameter(torch.full((1,), self.initial_scale)) if train_scale else None

    def initialize(self) -> None:
        if self.scale is not None:
            init.constant_(self.scale, self.initial_scale)

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        table = sinusoids(position_ids, self.hidden_size, self.layout)
        return table * (self.initial_scale if self.scale is None else self.scale)


def positions_among_real(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return each token's position among the real tokens, [B, N] → int [B, N]; those of padding are meaningless."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def sinusoids(positions: torch.Tensor, size: int, layout: str = "interleaved") -> torch.Tensor:
    """Return sin and cos of positions / 10000^(2i/size), float32 [..., size].

    layout: `interleaved` (sin, cos, sin, cos, ...; Vaswani et al.) or `halves` (all sines first; Marian, Pegasus).

    >>> sinusoids(torch.tensor(1), 4).tolist() == sinusoids(torch.tensor(1), 4, "halves")[[0, 2, 1, 3]].tolist()
    True
    """
    pairs = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32)
    angles = positions.unsqueeze(-1).float() * torch.exp(pairs * (-math.log(10_000.0) / size))
    if layout == "halves":
        return torch.cat((angles.sin(), angles.cos()), dim=-1)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def rotation(
    states: torch.Tensor, position_ids: torch.Tensor, head_dim: int, theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of rotary positions in the dtype of `states`, both [B or 1, T, head_dim]."""
    pairs = torch.arange(0, head_dim, 2, device=position_ids.device).float()
    angles = position_ids.unsqueeze(-1).float() * theta ** (-pairs / head_dim)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(states.dtype), angles.sin().to(states.dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return [B, H, T, D] rotated by the angles whose cosines and sines are [B or 1, T, D]."""
    return states * cos[:, None] + rotate_half(states) * sin[:, None]


def rotate_both(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rotate` of the queries and of the keys of the same tokens."""
    if query.shape[2] > 1 or torch.compiler.is_compiling():
        return rotate(query, cos, sin), rotate(key, cos, sin)
    # for one token, the seven operators of a second rotation take longer than this copy
    rotated = rotate(torch.cat((query, key), 1), cos, sin)
    return rotated[:, : query.shape[1]], rotated[:, query.shape[1] :]


def rotate_last(states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return [B, H, T, D] rotated by the last T angles, whose cosines and sines are [B or 1, T or more, D]."""
    cos, sin = (each[:, each.shape[1] - states.shape[2] :] for each in position_embeddings)
    return rotate(states, cos, sin)


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slope of every head (Press et al., arXiv:2108.12409).

    >>> alibi_slopes(3)
    (0.0625, 0.00390625, 0.25)
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return (*slopes, *(2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)))


def alibi_bias(num_heads: int, query_positions: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return −slope·|q − k| for every head, query and key.

    Shapes: query_positions [Q], on the axis of the keys → [1, H, Q, K], float32.

    >>> alibi_bias(2, torch.arange(3), 3)[0, 0, 2].tolist()
    [-0.125, -0.0625, -0.0]
    """
    distance = (query_positions.unsqueeze(-1) - torch.arange(num_keys, device=query_positions.device)).abs()
    slopes = device_numbers(alibi_slopes(num_heads), query_positions.device, torch.float32)
    return -slopes.view(1, -1, 1, 1) * distance


class TokenEmbedding(nn.Embedding):
    """Token embedding, initialised with N(0, `embedding_init_std`²); None: like every other matrix."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.initial_std = config.embedding_init_std

    def initialize(self) -> None:
        # the weight, padding included, may come from a checkpoint
        if self.initial_std is None or getattr(self.weight, "_is_hf_initialized", False):
            return
        init.normal_(self.weight, std=self.initial_std)
        if self.padding_idx is not None:
            init.zeros_(self.weight[self.padding_idx])


class EmbeddingSum(nn.Module):
    """Scale token embeddings and add positions and token types; then norm and dropout. [B, T, hidden_size] → the same.

    Reads from the config: `scale_embedding`, `embedding_norm`, `embedding_dropout`, and what `Positions` reads.

    num_types: the number of token types; 0: there are none.
    """

    def __init__(self, config: Any, size_field: str = "max_position_embeddings", num_types: int = 0) -> None:
        super().__init__()
        self.scale = config.hidden_size**0.5 if config.scale_embedding else None
        self.positions = Positions(config, size_field)
        self.token_types = nn.Embedding(num_types, config.hidden_size) if num_types else None
        self.norm = build_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, call: PreparedCall, token_type_ids: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Return the first hidden states, and keyword arguments for every attention layer; see `Positions`.

        Raises:
            InputError: token types for a model that has none or fewer, or a position beyond the end of a learned table.
        """
        embedded = call.embedded if self.scale is None else call.embedded * self.scale
        embedded, where = self.positions(embedded, call)
        embedded = with_types(embedded, token_type_ids, self.token_types)
        return self.dropout(self.norm(embedded)), where


def with_types(
    embedded: Tensor,
    types: Tensor | None,
    table: nn.Embedding | None,
    default: int = 0,
    name: str = "token_type_ids",
) -> Tensor:
    """Add the embeddings of token types to tokens [B, N, hidden_size].

    Args:
        types: [B, N]; None: all are of type `default`.
        table: the embeddings; None: the model has no types.
        name: the name of the types in messages.

    Raises:
        InputError: types of another shape, or that the model does not have.
    """
    if types is not None:
        check_types(types, embedded, 0 if table is None else table.num_embeddings, name)
    if table is None:
        return embedded
    if types is None:
        types = torch.full(embedded.shape[:2], default, dtype=torch.long, device=embedded.device)
    return embedded + table(types)


def check_types(types: Tensor, embedded: Tensor, size: int, name: str = "token_type_ids") -> None:
    """Raise InputError for token types whose shape is not that of the tokens, or that the model does not have.

    While compiling, values are not checked.

    Args:
        embedded: the tokens, [B, T, hidden_size].
        size: how many types the model has.
    """
    shape = tuple(embedded.shape[:2])
    if types.ndim != 2 or types.shape[1] != shape[1] or types.shape[0] not in (1, shape[0]):
        raise InputError(f"{name} has shape {list(types.shape)}; it must be {list(shape)}, one type for each token.")
    if torch.compiler.is_compiling() or not types.numel():
        return
    least, most = (int(each) for each in on_host(types).aminmax())
    if size == 0 and (least or most):
        raise InputError(
            f"{name} has types other than 0, but this model has no token types (type_vocab_size=0). Leave "
            "them out, or build it with type_vocab_size=2."
        )
    if size and (least < 0 or most >= size):
        raise InputError(
            f"{name} has type {most if most >= size else least}, but type_vocab_size={size}: types are 0 to "
            f"{size - 1}. Leave them out, or build the model with type_vocab_size={max(most + 1, 2)}."
        )
