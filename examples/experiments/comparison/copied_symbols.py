"""The copy task 0w0w of the Reformer: its texts, how a trained network reads them, and the share that it copies."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from hf_efficient_attn.bench.harness.seeds import over_seeds
from hf_efficient_attn.pictures import new_figure

# instead of a number of rounds: one chunk that holds the whole text
FULL = 0
IGNORED = -100


class CopiedWords(Dataset):
    """Texts 0w0w of random symbols 1, 2, …; `labels` ask for the second w alone.

    >>> CopiedWords(1, word_length=2, num_symbols=1, seed=0)[0]
    {'input_ids': tensor([0, 1, 1, 0, 1, 1]), 'labels': tensor([-100, -100, -100, -100,    1,    1])}
    """

    def __init__(self, num_texts: int, word_length: int, num_symbols: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(1, num_symbols + 1, (num_texts, word_length), generator=generator)
        zero = torch.zeros(num_texts, 1, dtype=torch.long)
        self.input_ids = torch.cat([zero, words, zero, words], 1)
        self.labels = self.input_ids.clone()
        self.labels[:, : word_length + 2] = IGNORED
        self.num_tokens = self.input_ids.shape[1]

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


def reading_name(num_hashes: int) -> str:
    """Return how a network reads, in a word that can be a folder's.

    >>> reading_name(FULL), reading_name(4)
    ('full', 'LSH-4')
    """
    return "full" if num_hashes == FULL else f"LSH-{num_hashes}"


@contextmanager
def reading(model: PreTrainedModel, num_hashes: int, num_tokens: int) -> Iterator[None]:
    """Let a Reformer read by so many rounds of hashing, or, with `FULL`, all `num_tokens` of a text."""
    config = model.config
    before = config.num_hashes, config.lsh_attn_chunk_length
    if num_hashes == FULL:
        config.num_hashes, config.lsh_attn_chunk_length = 1, num_tokens
    else:
        config.num_hashes = num_hashes
    try:
        yield
    finally:
        config.num_hashes, config.lsh_attn_chunk_length = before


@torch.no_grad()
def copied_share(model: PreTrainedModel, texts: CopiedWords, batch_size: int) -> float:
    """Return for which share of the labels the most probable symbol is the right one, given all symbols before."""
    model.eval()
    right = asked = 0
    for ids, labels in zip(texts.input_ids.split(batch_size), texts.labels.split(batch_size), strict=True):
        found = model(input_ids=ids.to(model.device), use_cache=False).logits.argmax(-1).cpu()
        is_asked = labels[:, 1:] != IGNORED
        right += ((found[:, :-1] == labels[:, 1:]) & is_asked).sum().item()
        asked += is_asked.sum().item()
    return right / asked


def draw_copies(rows: Sequence[dict[str, Any]]) -> Any:
    """Return two panels: the training loss of every network per step, and what it copies by how it reads."""
    figure = new_figure(11, 4.5)
    losses, copied = figure.subplots(1, 2)
    for row in rows:
        losses.plot(*zip(*row["losses"], strict=True), label=row["trained"])
        readers = list(row["copied"])[::-1]
        shares, deviations = zip(*(over_seeds(row["copied"][reader]) for reader in readers), strict=True)
        bars = deviations if any(deviations) else None
        copied.errorbar(readers, shares, bars, marker="o", capsize=3, label=row["trained"])
    losses.set(xlabel="training step", ylabel="cross-entropy (nats per copied symbol)", yscale="log", xlim=(0, None))
    losses.legend(title="trained with")
    copied.set(xlabel="evaluated with", ylabel="share of the symbols copied", ylim=(0, 1.05))
    figure.suptitle("Copying by full attention and by hashes")
    return figure
