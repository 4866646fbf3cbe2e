"""`examples/run_lora.py`, started as its users do, on a tiny model and texts of its own."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from run_example import finish_example, start_forked, write_rows
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, GlobalTokens

SCRIPT = "run_lora.py"
ARGUMENTS = ("--model_name_or_path", "model", "--train_file", "texts.jsonl", "--block_size", "32")
SMALL = ("--left", "3", "--num_first", "2", "--per_device_train_batch_size", "8", "--learning_rate", "1e-2")
WORDS = 40


def write_files(folder: Path) -> None:
    """Write a model, and texts in which a word tells the next."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    word_tokenizer(64).save_pretrained(folder / "model")
    texts = [" ".join(f"w{(start + n) % WORDS}" for n in range(100)) for start in range(60)]
    write_rows(folder / "texts.jsonl", [{"text": text} for text in texts])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_files(folder)
    finish_example(start_forked(folder, SCRIPT, *ARGUMENTS, *SMALL, "--num_train_epochs", "4", "--merge"))
    return folder


def test_adapters_learn(finished: Path) -> None:
    metrics = json.loads((finished / "run" / "eval_results.json").read_text())
    assert metrics.keys() >= {"dense_perplexity", "sparse_perplexity", "sparse_lora_perplexity"}
    assert metrics["dense_perplexity"] != metrics["sparse_perplexity"]
    assert metrics["sparse_lora_perplexity"] < 0.9 * metrics["sparse_perplexity"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@torch.no_grad()
def test_all_loaders_give_the_trained_model(finished: Path) -> None:
    assert not (finished / "run" / "config.json").exists()
    by_peft = AutoPeftModelForCausalLM.from_pretrained(finished / "run")
    by_transformers = AutoModelForCausalLM.from_pretrained(finished / "run")
    merged = AutoModelForCausalLM.from_pretrained(finished / "run" / "merged")
    dense = AutoModelForCausalLM.from_pretrained(finished / "model")
    sparse = hea.sparsify(AutoModelForCausalLM.from_pretrained(finished / "model"), Band(3, 0) | GlobalTokens([0, 1]))
    pattern = (Band(3, 0) | GlobalTokens([0, 1])).to_dict()
    ids = torch.arange(8, 40)[None]
    logits = merged(ids).logits
    for model in (by_peft, by_transformers, merged):
        assert model.config.attention_pattern == pattern
        assert model.config._attn_implementation == "efficient"
        torch.testing.assert_close(model(ids).logits, logits)
    # what they would give without the pattern, or without the adapter
    with_adapter = PeftModel.from_pretrained(dense, finished / "run")
    for model in (with_adapter, sparse):
        assert not torch.allclose(model(ids).logits, logits)


def test_evaluation_alone_reads_the_trained_adapter(finished: Path) -> None:
    results = finished / "run" / "eval_results.json"
    trained = json.loads(results.read_text())
    results.unlink()
    finish_example(start_forked(finished, SCRIPT, *ARGUMENTS, *SMALL, "--do_train", "False"))
    again = json.loads(results.read_text())
    for name in ("sparse_lora_perplexity", "sparse_perplexity", "dense_perplexity"):
        assert again[name] == pytest.approx(trained[name], rel=1e-5)


def test_it_goes_on_from_the_last_checkpoint(finished: Path) -> None:
    checkpoint = Path(hea.last_complete_checkpoint(str(finished / "run")))
    folder = finished / "resumed"
    shutil.copytree(finished / "model", folder / "model")
    shutil.copytree(checkpoint, folder / "run" / checkpoint.name)
    shutil.copy(finished / "texts.jsonl", folder)
    finish_example(start_forked(folder, SCRIPT, *ARGUMENTS, *SMALL, "--num_train_epochs", "5", "--resume"))
    states = [checkpoint, Path(hea.last_complete_checkpoint(str(folder / "run")))]
    before, after = (json.loads((state / "trainer_state.json").read_text()) for state in states)
    assert after["log_history"][: len(before["log_history"])] == before["log_history"]
    assert after["epoch"] == 5
