"""Tiny models in a folder with a tokenizer, as the command lines of neighbours want them."""

from pathlib import Path
from typing import Any

from models_cases import TINY
from word_tokenizer import word_tokenizer


def save_model(folder: Path, case: Any, auto_class: str | None = None, **fields: Any) -> Any:
    """Write the model of a case, with these fields in its config, and its tokenizer into a folder; return it."""
    model = case.model(auto_class or case.main_head, **fields)
    model.save_pretrained(folder)
    writes_end = model.config.is_encoder_decoder
    word_tokenizer(TINY["vocab_size"], writes_end).save_pretrained(folder)
    return model
