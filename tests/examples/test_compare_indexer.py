"""examples/experiments/compare_indexer.py, run as its users run it, on a tiny Llama."""

import json
from pathlib import Path

from run_example import finish_example, refusal, start_forked
from transformers import AutoModelForCausalLM, LlamaConfig

SCRIPT = "experiments/compare_indexer.py"
GIVEN = ["--model_name_or_path", "llama", "--train_file", "own.txt", "--top_k", "8", "--num_heads", "2"]
TINY = ["--text_tokens", "40", "--max_steps", "20", "--max_eval_samples", "2", "--learning_rate", "1e-2"]
TINY += ["--sparse_steps", "3"]


def test_the_choice_becomes_better(tmp_path: Path) -> None:
    from example_data import new_tokenizer

    tokenizer = new_tokenizer(["import os"], vocab_size=280)
    tokenizer.save_pretrained(tmp_path / "llama")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, bos_token_id=1, initializer_range=0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    (tmp_path / "own.txt").write_text("".join(f"import os{number}\n" for number in range(100)))
    output = finish_example(start_forked(tmp_path, SCRIPT, *GIVEN, *TINY))
    assert "chosen after the warm-up" in output
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    dense, before, after, sparse, trained = results["rows"]
    assert after["recall"] > before["recall"]
    # the model has learned, too
    assert sparse["loss"] != after["loss"]
    assert trained["loss"] != dense["loss"]
    assert sparse["reload_difference"] < 1e-5
    assert {name: each["num_steps"] for name, each in results["steps"].items()} == {
        "warm-up": 20,
        "sparse stage": 3,
        "all keys": 3,
    }
    assert (
        json.loads((tmp_path / "run" / "model" / "config.json").read_text())["attention_indexer"]["stage"] == "sparse"
    )
    said = refusal(start_forked(tmp_path, SCRIPT, *GIVEN, "--text_tokens", "9000"))
    assert said == "--text_tokens 9000: the text has fewer tokens than one to train on and one to test."
