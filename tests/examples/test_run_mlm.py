"""examples/run_mlm.py, run as its users run it, on a tiny BERT."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from run_example import finish_example, start_forked, write_rows
from tiny_bert import texts, write_tiny_bert
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
)

from hf_efficient_attn.patterns import Band

TINY = ["--max_seq_length", "32", "--disable_tqdm", "True", "--max_train_samples", "4"]


def run(folder: Path, *arguments: str) -> str:
    return finish_example(start_forked(folder, "run_mlm.py", *TINY, *arguments))


def blocks(tokenizer: BertTokenizerFast, num: int) -> Dataset:
    """As the example makes them of so many texts."""
    ids = [token for text in texts(num) for token in [*tokenizer(text, add_special_tokens=False).input_ids, 3]]
    return Dataset.from_dict({"input_ids": [[2, *ids[end - 30 : end], 3] for end in range(30, len(ids) + 1, 30)]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a BERT made long in `run`, trained for two epochs of four steps."""
    folder = tmp_path_factory.mktemp("run_mlm")
    for name, num in (("train", 30), ("held_out", 9)):
        write_rows(folder / f"{name}.jsonl", [{"text": text} for text in texts(num)])
    write_tiny_bert(folder / "bert")
    command = ["--model_name_or_path", "bert", "--attention_window", "8", "--max_eval_samples", "3"]
    command += ["--train_file", "train.jsonl", "--validation_file", "held_out.jsonl", "--logging_steps", "1"]
    command += ["--eval_strategy", "epoch", "--save_strategy", "epoch"]
    assert run(folder, *command, "--num_train_epochs", "2").count("'grad_norm'") == 8
    return folder


def test_losses_are_those_of_the_same_masked_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "run")
    rows = blocks(tokenizer, 9).shuffle(42).take(3)
    batch = DataCollatorForLanguageModeling(tokenizer, seed=42)(rows[:]["input_ids"])
    model = AutoModelForMaskedLM.from_pretrained(folder / "run").eval()
    assert (model.config.model_type, model.config.max_position_embeddings) == ("sparse_transformer", 32)
    assert model.config.attention_pattern == Band(left=4, right=4).to_dict()
    with torch.no_grad():
        losses = [
            cross_entropy(model(inputs[None]).logits[0], labels).item()
            for inputs, labels in zip(batch["input_ids"], batch["labels"], strict=True)
        ]
    metrics = json.loads((folder / "run" / "eval_results.json").read_text())
    assert metrics["eval_loss"] == pytest.approx(sum(losses) / 3, rel=1e-4)
    log = json.loads((folder / "run" / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    assert metrics["eval_loss"] < next(entry["eval_loss"] for entry in log if "eval_loss" in entry)
    assert tokenizer.model_max_length == 32


def test_the_loss_of_frequencies_is_that_of_counting(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "run")
    counts = Counter(token for block in blocks(tokenizer, 30)["input_ids"] for token in block)
    held_out = blocks(tokenizer, 9).shuffle(42)[:3]["input_ids"]
    labels = DataCollatorForLanguageModeling(tokenizer, seed=42)(held_out)["labels"]
    total = counts.total() + len(tokenizer)
    nats = [-math.log((counts[token] + 1) / total) for token in labels.flatten().tolist() if token != -100]
    metrics = json.loads((folder / "run" / "eval_results.json").read_text())
    assert metrics["loss_of_frequencies"] == pytest.approx(sum(nats) / len(nats))


@pytest.mark.parametrize("model_type", ["sparse_transformer", "star_transformer"])
def test_new_models_are_trained(folder: Path, tmp_path: Path, model_type: str) -> None:
    command = ["--model_type", model_type, "--train_file", str(folder / "train.jsonl"), "--max_steps", "1"]
    command += ["--config_overrides", "hidden_size=48,num_hidden_layers=2"]
    has_own_reach = model_type == "star_transformer"
    run(tmp_path, *command, *([] if has_own_reach else ["--attention_window", "8"]))
    config = AutoModelForMaskedLM.from_pretrained(tmp_path / "run").config
    assert (config.model_type, config.is_causal, config.hidden_size) == (model_type, False, 48)
    if not has_own_reach:
        assert config.attention_pattern == Band(left=4, right=4).to_dict()


def test_a_window_acts_on_a_checkpoint_that_is_long_already(folder: Path, tmp_path: Path) -> None:
    command = ["--model_name_or_path", str(folder / "run"), "--train_file", str(folder / "train.jsonl")]
    run(tmp_path, *command, "--attention_window", "4", "--max_steps", "1", "--max_eval_samples", "1")
    config = AutoModelForMaskedLM.from_pretrained(tmp_path / "run").config
    assert config.attention_pattern == Band(left=2, right=2).to_dict()
