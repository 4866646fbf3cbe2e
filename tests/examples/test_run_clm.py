"""examples/run_clm.py, run as its users run it."""

import json
import math
from pathlib import Path
from random import Random

import pytest
import torch
from run_example import finish_example, start_forked, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_efficient_attn.patterns import Band, GlobalTokens

TINY = ["--block_size", "32", "--disable_tqdm", "True", "--max_train_samples", "8"]
SMALL = ["--config_overrides", "hidden_size=24,num_hidden_layers=2"]
WORDS = ("the", "list", "of", "a", "file", "path", "returns", "opens", "value", "é")


def run(folder: Path, *arguments: str) -> str:
    return finish_example(start_forked(folder, "run_clm.py", *TINY, *arguments))


def texts(num: int) -> list[str]:
    random = Random(num)
    return [" ".join(random.choices(WORDS, k=60)) + "." for _ in range(num)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model in `run`, trained for two epochs of two steps, interrupted between them."""
    folder = tmp_path_factory.mktemp("run_clm")
    for name, num in (("train", 30), ("held_out", 9)):
        write_rows(folder / f"{name}.jsonl", [{"text": text} for text in texts(num)])
    (folder / "lines.txt").write_text("\n".join(texts(40)), encoding="utf-8")
    command = [*SMALL, "--train_file", "train.jsonl", "--validation_file", "held_out.jsonl", "--logging_steps", "1"]
    command += ["--eval_strategy", "epoch", "--save_strategy", "epoch"]
    assert run(folder, *command, "--num_train_epochs", "1").count("'grad_norm'") == 2
    assert run(folder, *command, "--num_train_epochs", "2", "--resume").count("'grad_norm'") == 2
    assert {path.name for path in folder.glob("run/checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    return folder


def test_metrics_are_those_of_the_saved_model(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "run").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "run")
    assert (model.config.model_type, model.config.block) == ("simplified_transformer", "sas_p")
    ids = [token for text in texts(9) for token in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    blocks = torch.tensor(ids[: len(ids) // 32 * 32]).view(-1, 32)
    with torch.no_grad():
        loss = model(blocks, labels=blocks).loss.item()
    num_bytes = sum(len(tokenizer.decode(block, skip_special_tokens=True).encode()) for block in blocks)
    metrics = json.loads((folder / "run" / "eval_results.json").read_text())
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)
    assert metrics["bits_per_byte"] == pytest.approx(loss / math.log(2) * blocks.numel() / num_bytes, rel=1e-3)


def test_a_checkpoint_goes_on_with_a_pattern(folder: Path) -> None:
    command = ["--model_name_or_path", str(folder / "run"), "--train_file", str(folder / "lines.txt")]
    (folder / "sparse").mkdir()
    run(folder / "sparse", *command, "--attention_window", "8", "--max_steps", "1")
    config = AutoModelForCausalLM.from_pretrained(folder / "sparse" / "run").config
    assert config.attention_pattern == (Band(left=8, right=0) | GlobalTokens([0, 1, 2, 3])).to_dict()


@pytest.mark.parametrize("model_type", ["sparse_transformer", "llama"])
def test_other_families_are_trained(folder: Path, tmp_path: Path, model_type: str) -> None:
    run(tmp_path, *SMALL, "--model_type", model_type, "--train_file", str(folder / "train.jsonl"), "--max_steps", "1")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert (model.config.model_type, model.config.num_hidden_layers) == (model_type, 2)
