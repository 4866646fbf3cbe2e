"""examples/sparsify_llama.py, run as its users run it, on a tiny Llama."""

import json
from pathlib import Path

import pytest
from run_example import finish_example, start_forked
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import hf_efficient_attn as hea

SCRIPT = "sparsify_llama.py"
TIMED = ["dense", "band", "band + first tokens", "the same, every second layer"]
WAYS = [*TIMED, "the same, positions in the cache"]
GIVEN = ["--model_name_or_path", "llama", "--text_file", "own.txt", "--text_tokens", "600", "--left", "60"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a run has left `run`."""
    from example_data import new_tokenizer

    folder = tmp_path_factory.mktemp("llama")
    tokenizer = new_tokenizer(["import os"], vocab_size=280)
    tokenizer.save_pretrained(folder / "llama")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, bos_token_id=1, initializer_range=0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "llama")
    (folder / "own.txt").write_text("".join(f"import os{number}\n" for number in range(400)))
    output = finish_example(start_forked(folder, SCRIPT, *GIVEN))
    assert all(way in output for way in WAYS)
    return folder


def test_results_are_those_of_every_way(finished: Path) -> None:
    results = json.loads((finished / "run" / "results.json").read_text())
    assert list(results["perplexity"]) == WAYS
    assert list(results["prompt_seconds"]) == TIMED
    assert all(list(of) == ["512", "600"] for of in results["perplexity"].values())
    assert len({of["600"] for of in results["perplexity"].values()}) == len(WAYS)
    assert all(list(of) == ["512"] for of in results["prompt_seconds"].values())
    assert results["settings"]["texts"] == 3
    assert "llama" in results["command"]


def test_the_model_is_left_sparse_and_can_be_given_back(finished: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished / "run")
    hea.PatternCache(model, positions="cache")  # refuses models without a pattern
    assert AutoTokenizer.from_pretrained(finished / "run")("import os")["input_ids"][0] == model.config.bos_token_id
    finish_example(start_forked(finished, SCRIPT, *GIVEN, "--model_name_or_path", "run", "--dense_layers", "0", "1"))
    results = json.loads((finished / "run" / "results.json").read_text())
    # without a layer that is sparse, all read alike
    assert len({f"{of['600']:.4g}" for of in results["perplexity"].values()}) == 1
