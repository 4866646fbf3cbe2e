"""examples/sparsify_llama.py, run as its users run it, at a tiny size."""

import json
from pathlib import Path

import pytest
from run_example import finish_example, start_forked
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_efficient_attn as hea

SCRIPT = "sparsify_llama.py"
WAYS = ["dense", "band", "band + first tokens", "the same, positions in the cache"]
TINY = ["--max_steps", "2", "--text_tokens", "600", "--left", "60"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a run has left `run`."""
    folder = tmp_path_factory.mktemp("llama")
    output = finish_example(start_forked(folder, SCRIPT, *TINY))
    assert all(way in output for way in WAYS)
    return folder


def test_results_are_those_of_every_way(finished: Path) -> None:
    results = json.loads((finished / "run" / "results.json").read_text())
    assert list(results["perplexity"]) == WAYS
    assert list(results["prompt_seconds"]) == WAYS[:3]
    for of in results["perplexity"].values():
        assert list(of) == ["512", "600"]
        assert all(1 < perplexity < 10_000 for perplexity in of.values())
    assert len({of["600"] for of in results["perplexity"].values()}) == 4
    assert all(list(of) == ["512", "1024"] for of in results["prompt_seconds"].values())
    assert results["settings"]["texts"] == 8
    assert "run" in results["command"]


def test_the_model_is_left_sparse_and_can_be_given_back(finished: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished / "run")
    hea.PatternCache(model, positions="cache")  # refuses models without a pattern
    assert AutoTokenizer.from_pretrained(finished / "run")("import os")["input_ids"][0] == model.config.bos_token_id
    (finished / "own.txt").write_text("import os\n" * 400)
    own = ["--model_name_or_path", "run", "--text_file", "own.txt", "--dense_layers", "0", "1", "2", "3"]
    finish_example(start_forked(finished, SCRIPT, *TINY, *own))
    results = json.loads((finished / "run" / "results.json").read_text())
    # without a layer that is sparse, all read alike
    assert len({f"{of['600']:.4g}" for of in results["perplexity"].values()}) == 1


def test_a_short_text_is_refused(finished: Path) -> None:
    (finished / "short.txt").write_text("import os\n")
    given = ["--model_name_or_path", "run", "--text_file", "short.txt"]
    output = finish_example(start_forked(finished, SCRIPT, *given), exit_code=1)
    assert "No text has 8,192 tokens" in output
    assert "Traceback" not in output
