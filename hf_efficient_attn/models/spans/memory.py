"""What a model remembers from one segment of a text to the next: the inputs of its layers, without gradients.

Keys and values are computed from them again, with the current weights. Source: Dai et al., "Transformer-XL"
(arXiv:1901.02860), section 3.2; Sukhbaatar et al. (arXiv:1905.07799), whose code does the same. Their code starts
with zeros, which queries read; here, what does not exist is not read.
"""

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.host_copies import on_host


class SegmentMemory:
    """Past inputs of every layer, [B, C, hidden_size] each, kept separately for training and evaluation."""

    def __init__(self) -> None:
        self._kept: dict[bool, tuple[int, list[Tensor]]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def read(self, segment_index: Tensor, is_training: bool, num_layers: int) -> tuple[int, list[Tensor | None]]:
        """Return the number of the segment, and what each layer has kept, or None where a text begins.

        Args:
            segment_index: int [B], the number of this segment in its row, the same in all rows.

        Raises:
            InputError: rows at different segments, or a segment that does not follow the last one.
        """
        numbers = sorted(set(on_host(segment_index).tolist()))
        if len(numbers) != 1:
            raise InputError(
                f"segment_index holds {numbers[:5]}: the rows of a batch must all be at the same segment of their "
                "texts. TextSegments with num_rows = batch size x processes gives such batches, unshuffled."
            )
        if numbers[0] == 0:
            return 0, [None] * num_layers
        last, kept = self._kept.get(is_training, (None, []))
        if last is None or numbers[0] != last + 1 or len(kept[0]) != segment_index.shape[0]:
            seen = "none before" if last is None else f"{last} of {len(kept[0])} rows before"
            raise InputError(
                f"segment_index={numbers[0]} of {segment_index.shape[0]} rows, but {seen}: segments must come in "
                "order, each row continued by the next batch. Do not shuffle (train_sampling_strategy='sequential'), "
                "drop an incomplete last batch, and start texts anew with segment_index=0. Training that resumes in "
                "the middle of a text needs the segment_memory file that SpanCallback writes beside each checkpoint."
            )
        return numbers[0], list(kept)

    def write(self, number: int, is_training: bool, states: list[Tensor]) -> None:
        """Keep the layers' inputs of segment `number` for the segment that follows."""
        self._kept[is_training] = (number, [tensor.detach() for tensor in states])


def remember(memory: Tensor | None, hidden_states: Tensor, num_tokens: int) -> Tensor:
    """Return the last `num_tokens` of memory and new states, [B, at most num_tokens, hidden_size]."""
    joined = hidden_states if memory is None else torch.cat((memory, hidden_states), 1)
    return joined[:, max(0, joined.shape[1] - num_tokens) :].detach()
