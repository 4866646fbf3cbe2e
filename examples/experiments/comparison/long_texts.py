"""Texts of equal length for models that are trained further: from a file of one's own, or Python's documentation."""

from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from example_data import python_documentation
from transformers import PreTrainedTokenizerBase

from hf_efficient_attn.bench.text_blocks import cut

HELD_OUT = 0.1


@dataclass(frozen=True)
class LongTexts:
    """What is trained on, in rows of `input_ids` and `labels`, and what is held out."""

    train: Dataset
    held_out: list[list[int]]


def long_texts(
    tokenizer: PreTrainedTokenizerBase, train_file: str | None, text_tokens: int, max_eval_samples: int
) -> LongTexts:
    """Return texts of `text_tokens` tokens.

    Args:
        train_file: text whose last tenth is held out; None: Python's documentation, of which whole pages are held out.
        max_eval_samples: how many are held out at most, evenly spaced.
    """
    if train_file:
        text = Path(train_file).read_text(encoding="utf-8")
        end = len(text) - round(HELD_OUT * len(text))
        parts = [[text[:end]], [text[end:]]]
    else:
        pages = python_documentation()
        parts = [list(pages[split]["text"]) for split in ("train", "validation")]
    train, held_out = (cut(texts, tokenizer, text_tokens) for texts in parts)
    if not (train and held_out):
        raise SystemExit(
            f"--text_tokens {text_tokens}: the text has fewer tokens than one to train on and one to test."
        )
    count = min(max_eval_samples, len(held_out))
    spread = [held_out[index * len(held_out) // count] for index in range(count)]
    return LongTexts(Dataset.from_dict({"input_ids": train, "labels": train}), spread)
