"""Masked summation: sequences of vectors of which a few are marked, their sum, and how far off a network is."""

from collections.abc import Iterator
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from hf_efficient_attn.bench.harness.panels import label_decades
from hf_efficient_attn.bench.harness.seeds import over_seeds
from hf_efficient_attn.pictures import new_figure

# of numbers that are uniform from 0 to 1
VARIANCE = 1 / 12
TITLES = {"star": "Star-Transformer", "dense": "dense Transformer", "lstm": "LSTM, both directions"}


class MarkedVectors(IterableDataset):
    """Endless batches of sequences, each of another length between two; the same ones for the same seed.

    The first number of a vector is 1 where it is marked, and else 0; `num_marked` are.

    >>> batch = next(iter(MarkedVectors((5, 5), num_marked=2, width=3, batch_size=4, seed=0)))
    >>> batch["inputs_embeds"].shape, batch["labels"].shape, batch["inputs_embeds"][..., 0].sum(1).tolist()
    (torch.Size([4, 5, 4]), torch.Size([4, 3]), [2.0, 2.0, 2.0, 2.0])
    """

    def __init__(self, lengths: tuple[int, int], num_marked: int, width: int, batch_size: int, seed: int) -> None:
        self.lengths, self.num_marked, self.width = lengths, num_marked, width
        self.batch_size, self.seed = batch_size, seed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        shortest, longest = self.lengths
        while True:
            length = int(torch.randint(shortest, longest + 1, (), generator=generator))
            vectors = torch.rand(self.batch_size, length, self.width, generator=generator)
            drawn = torch.rand(self.batch_size, length, generator=generator).topk(self.num_marked).indices
            marks = torch.zeros(self.batch_size, length, 1).scatter(1, drawn.unsqueeze(-1), 1.0)
            yield {"inputs_embeds": torch.cat((marks, vectors), -1), "labels": (marks * vectors).sum(1)}


@torch.no_grad()
def relative_error(model: nn.Module, batches: MarkedVectors, num_batches: int) -> tuple[float, float]:
    """Return how far sums are off, and the milliseconds that a sequence takes.

    The error is the root of the mean squared one, divided by that of who always says the expected sum.
    """
    squares, seconds = [], 0.0
    for batch, _ in zip(batches, range(num_batches), strict=False):
        start = perf_counter()
        found = model(inputs_embeds=batch["inputs_embeds"])["logits"]
        seconds += perf_counter() - start
        squares.append((found - batch["labels"]).square().mean().item())
    guessed = VARIANCE * batches.num_marked
    return (fmean(squares) / guessed) ** 0.5, 1000 * seconds / (num_batches * batches.batch_size)


def draw_errors(content: dict[str, Any]) -> Any:
    """Return the error by length of every network; the lengths of the training are shaded."""
    figure = new_figure(7.5, 4.5)
    panel = figure.subplots()
    for name, row in content["networks"].items():
        lengths = [int(length) for length in row["errors"]]
        means, deviations = zip(*map(over_seeds, row["errors"].values()), strict=True)
        bars = deviations if any(deviations) else None
        panel.errorbar(lengths, means, bars, marker="o", capsize=3, label=TITLES[name])
    panel.axhline(1.0, color="0.5", linestyle=":", label="always guessing the mean")
    panel.axvspan(*content["train_lengths"], color="0.9", label="trained on")
    title = f"The sum of {content['num_marked']} marked vectors"
    panel.set(title=title, xlabel="vectors", ylabel="error, over that of guessing the mean", yscale="log")
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
    label_decades(panel)
    panel.grid(alpha=0.3)
    panel.legend()
    return figure
