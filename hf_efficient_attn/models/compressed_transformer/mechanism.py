"""What the attention of every mechanism has: maps of queries, keys, values and output, and texts one by one."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.attention.sharded.dealt_heads import DealtHeads
from hf_efficient_attn.attention.sharded.mechanisms import deal_layer
from hf_efficient_attn.attention.weight_rows import chosen_rows
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.token_mask import NO_MASK

from .texts import TextGroup, Texts


class MechanismAttention(nn.Module):
    """Multi-head attention by a mechanism. [B, T, hidden_size] → the same, and the weights or None.

    A mechanism defines `read`, which is given texts that all begin at their first place, and `costs`.
    """

    # whether its weights are those of the tokens of a text, and not of fewer keys
    reads_tokens: ClassVar[bool] = False

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_heads, self.is_causal = config.num_attention_heads, config.is_causal
        self.scaling = config.head_dim**-0.5
        width = config.hidden_size
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=config.attention_bias) for _ in range(3))
        self.o_proj = nn.Linear(width, width, bias=config.attention_output_bias)
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(self, hidden_states: Tensor, texts: Texts, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the output and, with `output_attentions`, the weights [B, H, T, S] of what each token reads."""
        need_weights = bool(kwargs.pop("output_attentions", self.config.output_attentions))
        dealt = deal_layer(self, self.num_heads, kwargs.get("token_mask", NO_MASK), need_weights)
        if dealt is not None:
            return self.o_proj(self._attend_dealt(hidden_states, texts, dealt, **kwargs)), None
        parts = [
            self.attend(states, group.real, need_weights=need_weights, **kwargs)
            for states, group in zip(texts.split(hidden_states), texts.groups, strict=True)
        ]
        out = texts.join([part for part, _ in parts])
        weights = None
        if need_weights:
            read = [weights for _, weights in parts]
            if self.reads_tokens:
                read = [at_tokens(each, group, texts) for each, group in zip(read, texts.groups, strict=True)]
            weights = joined_weights(read, texts)
        return self.o_proj(out), weights

    def attend(
        self, hidden_states: Tensor, real: Tensor | None, need_weights: bool, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the tokens of texts [R, L, hidden_size] read, and the weights; see `read`."""
        return self.read(self.project(hidden_states), real, need_weights, **kwargs)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Return what `read` takes of tokens, [B, T, H · D] each."""
        return self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)

    def read(
        self,
        states: Sequence[Tensor],
        real: Tensor | None,
        need_weights: bool,
        dealt: DealtHeads | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the tokens of texts read, [R, L, h · D], and the weights [R, h, L, S] if they are needed.

        Args:
            states: what `project` returns, [R, L, h · D] each.
            real: which places hold tokens, always the first ones of a text, bool [R, L]; None: all. The states of
                others are any, finite or not, and so is what is returned for them.
            dealt: of which heads they are; None: all.
        """
        raise NotImplementedError

    def _attend_dealt(self, hidden_states: Tensor, texts: Texts, dealt: DealtHeads, **kwargs: Any) -> Tensor:
        """Return what this process's tokens read, [B, n, hidden_size], where processes share the texts."""
        states = [
            texts.split(dealt.whole_texts(self.heads(each)).transpose(1, 2).flatten(2))
            for each in self.project(hidden_states)
        ]
        parts = [
            self.read(each, group.real, False, dealt, **kwargs)[0]
            for each, group in zip(zip(*states, strict=True), texts.groups, strict=True)
        ]
        return dealt.own_tokens(self.heads(texts.join(parts))).transpose(1, 2).flatten(2)

    def heads(self, states: Tensor) -> Tensor:
        """Return [R, L, H · D] as [R, H, L, D]."""
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def costs(self, num_keys: int) -> str:
        """Return in a sentence what a head computes for so many tokens."""
        raise NotImplementedError

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        """Refuse: nothing is asked of the engine.

        Raises:
            UnsupportedBackendError: always; it says what is computed instead.
        """
        raise UnsupportedBackendError(f"{self.costs(num_keys)} It computes them itself, and no backend is chosen.")


def zeroed(states: Tensor, real: Tensor | None) -> Tensor:
    """Return states [R, L, X] with zeros behind the texts."""
    return states if real is None else torch.where(real.unsqueeze(-1), states, 0)


def at_tokens(weights: Tensor, group: TextGroup, texts: Texts) -> Tensor:
    """Return weights of the tokens of texts by where these are in their rows, [R, H, L, L] → [R, H, L, T]."""
    if group.index is None or texts.places is None:
        return weights
    tokens = texts.places.shape[1]
    columns = (group.index % tokens)[:, None, None].expand(weights.shape)
    read = weights if group.real is None else torch.where(group.real[:, None, None], weights, 0)
    return weights.new_zeros(*weights.shape[:3], tokens).scatter_add(3, columns, read)


def joined_weights(parts: Sequence[Tensor], texts: Texts) -> Tensor:
    """Return the weights of the batch, of all queries or of those of `weights_of_rows`: [R, H, L, S] → [B, H, T, S].

    What texts of different groups read may differ in number: the weights of fewer are followed by zeros.
    """
    num_heads, most = parts[0].shape[1], max(part.shape[3] for part in parts)
    padded = [torch.nn.functional.pad(part, (0, most - part.shape[3])) for part in parts]
    joined = texts.join([part.transpose(1, 2).flatten(2) for part in padded])
    weights = joined.unflatten(2, (num_heads, most)).transpose(1, 2)
    chosen = chosen_rows()
    return weights if chosen is None else weights[:, :, list(chosen)]
