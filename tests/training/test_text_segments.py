"""TextSegments and SegmentCollator: rows go on from batch to batch, on every process, and no target is lost."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from training.span_runs import build_trainer
from training.tiny_models import one_block

import hf_efficient_attn as hea

TOKENS, SEGMENT = 103, 5


def read(num_rows: int, processes: int = 1, split_batches: bool = False) -> list[list[dict[str, torch.Tensor]]]:
    """Return the batches of each process, dealt out as accelerate does."""
    segments = hea.TextSegments(torch.arange(TOKENS), num_rows, SEGMENT)
    batch_size = num_rows if split_batches else num_rows // processes
    dealt = []
    for process in range(processes):
        batches = BatchSampler(SequentialSampler(segments), batch_size, drop_last=False)
        shard = BatchSamplerShard(batches, processes, process, split_batches=split_batches)
        dealt.append(list(DataLoader(segments, batch_sampler=shard, collate_fn=hea.SegmentCollator())))
    return dealt


@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_rows_go_on_on_every_process(processes: int, split_batches: bool) -> None:
    """Joined over its batches, row j of process p is a contiguous piece of the text: the (p · rows + j)-th."""
    num_rows = 2 * processes
    row_tokens = TOKENS // num_rows
    num_segments = (row_tokens - 1) // SEGMENT
    for process, batches in enumerate(read(num_rows, processes, split_batches)):
        assert [batch["segment_index"].tolist() for batch in batches] == [[i, i] for i in range(num_segments)]
        for row in range(2):
            inputs, targets = (
                torch.cat([batch[name][row] for batch in batches]).tolist() for name in ("input_ids", "shift_labels")
            )
            first = (2 * process + row) * row_tokens
            assert inputs == list(range(first, first + num_segments * SEGMENT))
            assert targets == [token + 1 for token in inputs]


def test_every_target_counts_once() -> None:
    """All tokens of a row but its first, and a tail shorter than a segment, are predicted exactly once."""
    (batches,) = read(num_rows=4)
    targets = torch.cat([batch["shift_labels"].flatten() for batch in batches]).tolist()
    assert len(targets) == len(set(targets))
    # 25 tokens a row: four segments of five, and the first token of the fifth as the last target
    assert sorted(targets) == [row * 25 + place for row in range(4) for place in range(1, 21)]


def test_items_are_what_they_say() -> None:
    segments = hea.TextSegments(list(range(TOKENS)), 4, SEGMENT)
    assert len(segments) == 16
    item = segments[4 * 2 + 3]
    assert item["segment_index"] == 2
    assert item["input_ids"].tolist() == list(range(85, 90))
    assert item["labels"].tolist() == list(range(86, 91))
    for index in (16, -1):
        with pytest.raises(IndexError, match="0 to 15"):
            segments[index]


def test_bytes_are_kept_as_bytes() -> None:
    text = torch.frombuffer(bytearray(b"attention " * 20), dtype=torch.uint8)
    segments = hea.TextSegments(text, 2, 16)
    assert segments.rows.dtype == torch.uint8
    assert segments.rows.data_ptr() == text.data_ptr()
    assert segments[0]["input_ids"].dtype == torch.int64


def tiny_model() -> hea.SimplifiedTransformerForCausalLM:
    torch.manual_seed(0)
    return one_block(vocab_size=TOKENS)


def watch(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return a list that fills with what the model is given, its logits and its loss, forward by forward."""
    seen: list[dict[str, Any]] = []

    def keep(module: torch.nn.Module, args: Any, given: dict[str, Any], outputs: Any) -> None:
        seen.append({**given, "loss": outputs["loss"].detach(), "logits": outputs["logits"].detach()})

    model.register_forward_hook(keep, with_kwargs=True)
    return seen


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_reads_on_and_counts_all_targets(tmp_path: Path, accumulation: int) -> None:
    """Loss = mean over all M targets of each row, whatever is accumulated; after the last segment comes the first."""
    model = tiny_model()
    seen = watch(model)
    options = {"gradient_accumulation_steps": accumulation, "max_steps": 6 // accumulation}
    build_trainer(tmp_path, model, hea.TextSegments(torch.arange(TOKENS), 4, SEGMENT), **options).train()
    assert [forward["input_ids"][0, 0].item() for forward in seen] == [0, 5, 10, 15, 0, 5]
    for forward in seen:
        assert int(forward["num_items_in_batch"]) == 4 * SEGMENT * accumulation
        nats = torch.nn.functional.cross_entropy(forward["logits"].flatten(0, 1), forward["input_ids"].flatten() + 1)
        torch.testing.assert_close(forward["loss"] * accumulation, nats)


def test_shuffled_items_are_refused() -> None:
    items = [hea.TextSegments(torch.arange(TOKENS), 2, SEGMENT)[index] for index in (0, 5)]
    with pytest.raises(hea.InputError, match=r"segments \[0, 2\].*sequential"):
        hea.SegmentCollator()(items)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(4, 5, dtype=torch.long), 1, 2), r"\[4, 5\] of torch.int64"),
        ((torch.zeros(40), 1, 2), "float32"),
        ((torch.arange(40), 0, 2), "num_rows=0"),
        ((torch.arange(40), 2, 0), "segment_tokens=0"),
        ((torch.arange(40), 4, 10), "44 are needed"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(hea.InputError, match=message):
        hea.TextSegments(*arguments)
