"""What the attention of every mechanism does with texts: each is read by itself, whatever is around it."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.attention.weight_rows import chosen_rows
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.models.mechanisms.texts import TextGroup, Texts


class TextReading(nn.Module):
    """Multi-head attention by a mechanism, between the maps of queries, keys and values and that of the output.

    A mechanism defines `project`, `read`, which is given texts that all begin at their first place, and `costs`.
    """

    # whether its weights are those of the tokens of a text, and not of fewer keys
    reads_tokens: ClassVar[bool] = False

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_heads, self.is_causal = config.num_attention_heads, config.is_causal
        self.scaling = config.head_dim**-0.5
        self.dropout = nn.Dropout(config.attention_dropout)

    def read_texts(self, states: Tensor, texts: Texts, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return what the tokens of a batch read, [B, T, H · D], and, with `output_attentions`, the weights.

        Args:
            states: what `project` takes, [B, T, X].
        """
        need_weights = bool(kwargs.pop("output_attentions", self.config.output_attentions))
        parts = [
            self.attend(part, group.real, need_weights=need_weights, **kwargs)
            for part, group in zip(texts.split(states), texts.groups, strict=True)
        ]
        out = texts.join([part for part, _ in parts])
        weights = None
        if need_weights:
            read = [weights for _, weights in parts]
            if self.reads_tokens:
                read = [at_tokens(each, group, texts) for each, group in zip(read, texts.groups, strict=True)]
            weights = joined_weights(read, texts)
        return out, weights

    def attend(
        self, states: Tensor, real: Tensor | None, need_weights: bool, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the tokens of texts [R, L, X] read, and the weights; see `read`."""
        return self.read(self.project(states), real, need_weights, **kwargs)

    def project(self, states: Tensor) -> tuple[Tensor, ...]:
        """Return what `read` takes of tokens, [B, T, X] → [B, T, H · D] each."""
        raise NotImplementedError

    def read(
        self,
        states: Sequence[Tensor],
        real: Tensor | None,
        need_weights: bool,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the tokens of texts read, [R, L, h · D], and the weights [R, h, L, S] if they are needed.

        Args:
            states: what `project` returns, [R, L, h · D] each.
            real: which places hold tokens, always the first ones of a text, bool [R, L]; None: all. The states of
                others are any, finite or not, and so is what is returned for them.
        """
        raise NotImplementedError

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
