"""examples/experiments/compare_block_top_k.py, run as its users run it, on a tiny Llama."""

import json
from pathlib import Path

import pytest
from run_example import finish_example, refusal, start_forked
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_efficient_attn.patterns import BlockTopK

SCRIPT = "experiments/compare_block_top_k.py"
TINY = ["--model_name_or_path", "llama", "--train_file", "own.txt", "--block_tokens", "4", "--num_chosen", "2"]
TINY += ["--text_tokens", "32", "--max_steps", "3", "--max_eval_blocks", "2", "--full_attention_share", "0.34"]


@pytest.mark.thorough
def test_blocks_are_compared_with_all_keys_before_and_after_training(tmp_path: Path) -> None:
    from example_data import new_tokenizer

    tokenizer = new_tokenizer(["import os"], vocab_size=280, ends="$A")
    tokenizer.save_pretrained(tmp_path / "llama")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, bos_token_id=1, initializer_range=0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    (tmp_path / "own.txt").write_text("".join(f"import os{number}\n" for number in range(100)))
    message = refusal(start_forked(tmp_path, SCRIPT, *TINY, "--text_tokens", "9000"))
    assert message.startswith("--text_tokens 9000: the text has fewer tokens")
    finish_example(start_forked(tmp_path, SCRIPT, *TINY, "--num_full_layers", "1"))
    rows = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    ways = [("none", "blocks"), ("none", "all"), ("blocks", "blocks"), ("blocks", "all"), ("all", "all")]
    assert [(row["trained"], row["read"]) for row in rows] == ways
    # blocks are read, and both trainings change the model
    assert len({row["loss"] for row in rows}) == 5
    assert [row["gap"] for row in rows] == pytest.approx(
        [rows[0]["loss"] - rows[1]["loss"], 0, rows[2]["loss"] - rows[4]["loss"], rows[3]["loss"] - rows[4]["loss"], 0]
    )
    assert rows[4]["loss"] < rows[1]["loss"]
    for name, row, pattern in (("blocks", rows[2], [BlockTopK(4, 2).to_dict(), None]), ("dense", rows[4], None)):
        config = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / name).config
        assert getattr(config, "attention_pattern", None) == pattern
        assert row["reload_difference"] <= 1e-5
    assert (tmp_path / "run" / "losses.png").stat().st_size > 10_000
