"""examples/experiments/compare_sparse_llama.py, run as its users run it, on a tiny Llama."""

import json
from pathlib import Path

import pytest
from run_example import finish_example, refusal, start_forked
from transformers import AutoModelForCausalLM, LlamaConfig

SCRIPT = "experiments/compare_sparse_llama.py"
TINY = ["--model_name_or_path", "llama", "--train_file", "own.txt", "--text_tokens", "96", "--passage_tokens", "4"]
TINY += ["--left", "6", "--num_first", "2", "--block_tokens", "4", "--num_blocks", "2"]
TINY += ["--max_steps", "3", "--max_eval_samples", "2"]


@pytest.mark.thorough
def test_patterns_are_compared_before_and_after_training(tmp_path: Path) -> None:
    from example_data import new_tokenizer

    tokenizer = new_tokenizer(["import os"], vocab_size=280, ends="$A")
    tokenizer.save_pretrained(tmp_path / "llama")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, bos_token_id=1, initializer_range=0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    (tmp_path / "own.txt").write_text("".join(f"import os{number}\n" for number in range(300)))
    assert "--patterns band is unknown" in refusal(start_forked(tmp_path, SCRIPT, *TINY, "--patterns", "band"))
    message = refusal(start_forked(tmp_path, SCRIPT, *TINY, "--text_tokens", "9000"))
    assert message.startswith("--text_tokens 9000: the text is too short")
    assert "--left 40 reaches" in refusal(start_forked(tmp_path, SCRIPT, *TINY, "--left", "40"))
    finish_example(start_forked(tmp_path, SCRIPT, *TINY))
    results = json.loads((tmp_path / "run" / "results.json").read_text())["results"]
    found = {(result["pattern"], result["training"]): result for result in results}
    assert len(found) == len(results) == 12
    # each pattern gives another perplexity, and each training changes it
    assert len({result["perplexity"]["96"] for result in results}) == 12
    for result in results:
        assert set(result["recall"]) == {"first time", "near", "far"}
        assert all(0 <= share <= 100 for share in result["recall"].values())
    assert found["dense", "lora"]["trained"] < found["dense", "full"]["trained"]
    assert found["dense", "full"]["perplexity"]["96"] < found["dense", "none"]["perplexity"]["96"]
    assert (tmp_path / "run" / "positions.png").stat().st_size > 10_000
