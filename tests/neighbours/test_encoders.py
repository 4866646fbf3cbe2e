"""Families of encoders alone, and libraries of models that write texts."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from families import ENCODERS, READERS
from neighbours.saved_models import save_model

REASON = (
    "It has encoders alone: what trains, serves and evaluates models that write texts loads them by "
    "AutoModelForCausalLM, which refuses it."
)


@pytest.mark.parametrize("family", ENCODERS)
def test_what_writes_texts_is_no_encoder(family: str, tmp_path: Path, capability: Any) -> None:
    save_model(tmp_path, READERS[family])
    with pytest.raises(ValueError, match="for this kind of AutoModel: AutoModelForCausalLM"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for column in ("TRL", "serve", "lm-eval"):
        capability(family, column, reason=REASON)
