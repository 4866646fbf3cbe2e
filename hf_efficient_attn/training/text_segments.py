"""A long text as rows that a model with memory reads segment by segment, on any number of processes.

Source: Sukhbaatar et al. (arXiv:1905.07799) and the authors' code: B contiguous rows, consecutive blocks of M tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown


class TextSegments(Dataset[dict[str, Any]]):
    """Cut a text into `num_rows` contiguous rows, and each row into segments of `segment_tokens` tokens.

    Items come segment by segment: item i is segment i // num_rows of row i % num_rows. Read in this order in batches
    that divide a round of rows evenly, row j of a batch goes on where row j of the batch before it stopped, which is
    what `segment_index` tells a model that keeps past states. With Trainer:

        num_rows = args.per_device_train_batch_size * args.world_size
        args.train_sampling_strategy = "sequential"
        Trainer(model, args, train_dataset=TextSegments(ids, num_rows, 512), data_collator=SegmentCollator())

    Accelerate deals out whole batches in turn, so each process keeps its own rows; accumulated batches are consecutive
    segments. An item holds `input_ids` [M], `labels` [M], the token that follows each of them, and `segment_index`. No
    target is lost between two segments of a row; a row's tail, of at most M tokens, is.

    >>> segments = TextSegments(list(range(14)), num_rows=2, segment_tokens=3)
    >>> [(item["segment_index"], item["input_ids"].tolist(), item["labels"].tolist()) for item in segments]
    [(0, [0, 1, 2], [1, 2, 3]), (0, [7, 8, 9], [8, 9, 10]), (1, [3, 4, 5], [4, 5, 6]), (1, [10, 11, 12], [11, 12, 13])]

    Args:
        token_ids: the text, [N] integers: a sequence, an array or a tensor; kept in its own dtype.
        num_rows: rows read at once by all processes together.
        segment_tokens: M.

    Raises:
        InputError: token_ids are not one row of integers, or too few for one segment in each row.
    """

    def __init__(self, token_ids: Sequence[int] | torch.Tensor, num_rows: int, segment_tokens: int) -> None:
        ids = torch.as_tensor(token_ids)
        if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise InputError(f"token_ids must be [N] integers, but they are {list(ids.shape)} of {ids.dtype}.")
        for name, count in (("num_rows", num_rows), ("segment_tokens", segment_tokens)):
            if count < 1:
                raise InputError(f"{name}={count} must be at least 1.")
        if len(ids) < num_rows * (segment_tokens + 1):
            raise InputError(
                f"{len(ids):,} tokens do not fill one segment of {segment_tokens:,} tokens, and the token after it, in "
                f"each of {num_rows:,} rows: {num_rows * (segment_tokens + 1):,} are needed. Give more text, fewer "
                "rows or shorter segments."
            )
        row_tokens = len(ids) // num_rows
        self.num_rows, self.segment_tokens = num_rows, segment_tokens
        self.num_segments = (row_tokens - 1) // segment_tokens
        self.rows = ids[: num_rows * row_tokens].view(num_rows, row_tokens)

    def __len__(self) -> int:
        return self.num_rows * self.num_segments

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"There are items 0 to {len(self) - 1:,}, not {index:,}.")
        segment, row = divmod(index, self.num_rows)
        start = segment * self.segment_tokens
        tokens = self.rows[row, start : start + self.segment_tokens + 1].long()
        return {"input_ids": tokens[:-1], "labels": tokens[1:], "segment_index": segment}


class SegmentCollator:
    """Stack items of `TextSegments` into a batch whose every label counts.

    The loss of transformers' causal models shifts `labels` by one and so drops the last target of each row. The labels
    of an item are shifted already: they become `shift_labels`, which that loss, and Trainer's count of tokens, take as
    they are. `labels` are the input_ids, by transformers' convention, for whatever else reads them.

    Shapes: input_ids, labels, shift_labels [B, M]; segment_index [B].

    Raises:
        InputError: the rows are not all at one segment, so that no memory could follow them.
    """

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        input_ids = torch.stack([item["input_ids"] for item in items])
        batch = {
            "input_ids": input_ids,
            "labels": input_ids,
            "shift_labels": torch.stack([item["labels"] for item in items]),
        }
        # Trainer leaves out what the model's forward does not name: a model without memory reads single segments
        if "segment_index" in items[0]:
            segments = [item["segment_index"] for item in items]
            if len(set(segments)) > 1:
                raise InputError(
                    f"The rows of a batch are at the segments {shown(sorted(set(segments)))}, but must all be at one: "
                    "num_rows of TextSegments must be the batch size of a process (per_device_train_batch_size, in "
                    "evaluation per_device_eval_batch_size) x number of processes, and the items be read in order "
                    "(train_sampling_strategy='sequential')."
                )
            batch["segment_index"] = torch.tensor(segments)
        return batch
