"""datasets: texts that are streamed, never all in memory, train what the same texts train as a list."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import load_dataset
from families import DECODERS, WRITERS
from word_tokenizer import word_tokenizer

TEXTS = [" ".join(f"w{(7 * row + word) % 50}" for word in range(5 + row % 9)) for row in range(16)]


@pytest.mark.parametrize("family", DECODERS)
def test_streamed_texts_train_as_listed_ones(family: str, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tokenizer = word_tokenizer(61)
    weights = []
    for streaming in (True, False):
        data = load_dataset("json", data_files=str(tmp_path / "texts.jsonl"), split="train", streaming=streaming)
        rows = data.map(lambda row: {"input_ids": tokenizer(row["text"]).input_ids}, remove_columns=["text"])
        model = WRITERS[family].model()
        options: dict[str, Any] = {"max_steps": 3, "per_device_train_batch_size": 4, "save_strategy": "no"}
        options |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
        transformers.Trainer(
            model,
            transformers.TrainingArguments(str(tmp_path / "run"), train_sampling_strategy="sequential", **options),
            train_dataset=rows,
            data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        ).train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)
