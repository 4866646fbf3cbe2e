"""examples/experiments/copy_task.py, run as its users run it, on words of a few symbols; and the texts under it."""

import json
from pathlib import Path

import torch
from run_example import finish_example, refusal, start_forked
from transformers import AutoModelForCausalLM

import hf_efficient_attn as hea

SCRIPT = "experiments/copy_task.py"
TINY = ["--word_length", "7", "--num_symbols", "3", "--hidden_size", "16", "--intermediate_size", "16"]
TINY += ["--chunk_length", "4", "--max_steps", "4", "--batch_size", "4", "--max_test_samples", "6"]


def test_each_network_is_evaluated_in_each_way(tmp_path: Path) -> None:
    choice = ["--train_hashes", "0", "2", "--eval_hashes", "0", "4", "1", "--seeds", "0", "1"]
    output = finish_example(start_forked(tmp_path, SCRIPT, *TINY, *choice))
    assert "a guess has 33.3%" in output
    assert "2 seed(s)" in output
    rows = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    assert [row["trained"] for row in rows] == ["full", "LSH-2"]
    for row in rows:
        assert list(row["copied"]) == ["full", "LSH-4", "LSH-1"]
        assert all(len(shares) == 2 and all(0 <= each <= 1 for each in shares) for shares in row["copied"].values())
        assert (row["num_steps"], row["reload_difference"]) == (4, 0)
        config = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / row["trained"]).config
        assert (config.num_hashes, config.lsh_attn_chunk_length) == {"full": (1, 16), "LSH-2": (2, 4)}[row["trained"]]
    assert (tmp_path / "run" / "accuracy.png").stat().st_size > 10_000
    assert refusal(start_forked(tmp_path, SCRIPT, "--eval_hashes", "-1")).startswith("--eval_hashes needs numbers")


def test_one_chunk_of_the_whole_text_is_full_attention() -> None:
    """Whatever the hashes are; and the choice is undone."""
    from comparison.copied_symbols import FULL, CopiedWords, copied_share, reading

    torch.manual_seed(0)
    texts = CopiedWords(3, word_length=15, num_symbols=4, seed=0)
    config = hea.EfficientReformerConfig.copy_task(
        vocab_size=5, hidden_size=16, intermediate_size=16, num_attention_heads=2, lsh_attn_chunk_length=2,
        num_buckets=4, max_position_embeddings=32, pad_token_id=None, eos_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    model = hea.EfficientReformerForCausalLM(config).eval()
    found = []
    with torch.no_grad():
        for seed, hashes in ((0, FULL), (1, FULL), (0, 1), (1, 1)):
            model.config.hash_seed = seed
            with reading(model, hashes, texts.num_tokens):
                found.append(model(input_ids=texts.input_ids).logits)
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[2], found[3], atol=1e-3)
    assert (model.config.num_hashes, model.config.lsh_attn_chunk_length) == (4, 2)
    with reading(model, FULL, texts.num_tokens), torch.no_grad():
        right = model(input_ids=texts.input_ids).logits.argmax(-1)[:, 16:-1] == texts.input_ids[:, 17:]
        assert copied_share(model, texts, batch_size=2) == right.double().mean().item()
