"""examples/experiments/compare_routing.py, run as its users run it, on a few pages; and the arithmetic under it."""

import json
import math
import shutil
from pathlib import Path

import pytest
from run_example import finish_example, refusal, start_forked
from tiny_bert import texts
from tiny_packages import write_deb

import hf_efficient_attn as hea

SCRIPT = "experiments/compare_routing.py"
TINY = ["--hidden_size", "16", "--num_hidden_layers", "1", "--num_attention_heads", "2", "--keys_per_token", "8"]
TINY += ["--num_clusters", "2", "--block_size", "48", "--vocab_size", "270", "--max_steps", "3"]


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="reads a package of Debian")
def test_heads_that_route_are_compared_with_local_ones(tmp_path: Path) -> None:
    """With a few pages in place of Python's documentation."""
    (tmp_path / "cache").mkdir()
    pages = {f"doc/html/_sources/{n}.rst.txt": text.encode() for n, text in enumerate(texts(60))}
    write_deb(tmp_path / "cache" / "python3.11-doc_1_all.deb", pages)
    said = refusal(start_forked(tmp_path, SCRIPT, "--keys_per_token", "9000"))
    assert said == "--keys_per_token 9000 must be from 1 to --block_size."
    output = finish_example(start_forked(tmp_path, SCRIPT, *TINY))
    assert "bits per byte, equal time" in output
    kinds = json.loads((tmp_path / "run" / "results.json").read_text())["kinds"]
    assert list(kinds) == ["local", "routing"]
    for kind, result in kinds.items():
        config = hea.RoutingTransformerForCausalLM.from_pretrained(tmp_path / "run" / kind).config
        assert config.routing_heads(0) == (1 if kind == "routing" else 0)
        assert (result["scores_per_token"], result["train_tokens"]) == (8, 3 * 48)
        assert result["reload_difference"] <= 1e-6
        evaluated = [entry["eval_loss"] for entry in result["history"] if "eval_loss" in entry]
        assert evaluated[-1] / math.log(2) == pytest.approx(result["bits_per_token"], rel=1e-5)
        assert result["bits_per_token"] == pytest.approx(math.log2(270), rel=0.15)
    fastest = min(kinds.values(), key=lambda result: result["train_seconds"])
    assert fastest["bits_per_byte_at_equal_time"] == pytest.approx(fastest["bits_per_byte"], rel=1e-5)
    assert (tmp_path / "run" / "loss_curves.png").stat().st_size > 10_000
