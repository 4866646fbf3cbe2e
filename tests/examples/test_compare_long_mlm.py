"""examples/experiments/compare_long_mlm.py, run as its users run it, on a tiny BERT; and the arithmetic under it."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from run_example import finish_example, start_forked
from tiny_bert import texts, tiny_tokenizer, write_tiny_bert
from tiny_packages import write_deb
from transformers import AutoModelForMaskedLM

import hf_efficient_attn as hea

MLM = ["--model_name_or_path", "bert", "--max_length", "70", "--attention_window", "16", "--source_steps", "3"]
MLM += ["--max_steps", "2", "--max_eval_blocks", "3"]


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="reads a package of Debian")
def test_a_bert_made_long_is_measured_at_every_stage(tmp_path: Path) -> None:
    """With a BERT of 18 positions, and a few pages in place of Python's documentation."""
    write_tiny_bert(tmp_path / "bert")
    (tmp_path / "cache").mkdir()
    pages = {f"doc/html/_sources/{n}.rst.txt": text.encode() for n, text in enumerate(texts(60))}
    write_deb(tmp_path / "cache" / "python3.11-doc_1_all.deb", pages)
    finish_example(start_forked(tmp_path, "experiments/compare_long_mlm.py", *MLM))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [row["model"] for row in results["rows"]] == [
        "token frequencies",
        "source, 18 tokens",
        "70 tokens, random new positions",
        "70 tokens, copied positions",
        "70 tokens, copied positions, 2 steps",
        "source, 18 tokens, 2 steps",
    ]
    assert results["tokens_per_step"] == 64
    for name, place in (("source", 1), ("long", 4)):
        row, model = results["rows"][place], AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / name)
        assert row["reload_difference"] <= 1e-6
        assert model.config.max_position_embeddings == (18, 70)[name == "long"]
        nats = row["bits_per_masked_token"] * math.log(2)
        # nothing is learned yet: as likely as any of 15 tokens
        assert nats == pytest.approx(math.log(15), rel=0.15)
        ratio = results["masked_characters"] / results["masked_tokens"]
        assert row["bits_per_character"] == pytest.approx(row["bits_per_masked_token"] / ratio)


def test_short_and_long_blocks_hold_the_same_masked_tokens() -> None:
    from comparison.masked_text import BlockShape, join_texts, mask_held_out

    tokenizer = tiny_tokenizer()
    stream = join_texts(texts(6), tokenizer)
    assert "".join(stream.spelled) == "".join(texts(6))
    text = mask_held_out(stream, BlockShape(18, 70), tokenizer, 1, 10)
    assert (text.inputs.shape, text.segments) == ((5, 64), 4)
    for (long, long_labels), (short, short_labels) in zip(text.batches(False), text.batches(True), strict=True):
        assert (long.shape, short.shape) == ((1, 66), (4, 18))
        assert torch.equal(long[0, 1:-1], short[:, 1:-1].flatten())
        assert torch.equal(long_labels[0, 1:-1], short_labels[:, 1:-1].flatten())
        assert long_labels[0, 0] == short_labels[0, -1] == -100
    masked = [token for token in text.labels.flatten().tolist() if token != -100]
    assert "".join(tokenizer.convert_ids_to_tokens(masked)) == "".join(text.references).replace(" ", "")


def test_random_positions_leave_the_source_s_own_as_they_are() -> None:
    from compare_long_mlm import with_random_positions

    config = hea.SparseTransformerConfig.longformer(
        attention_window=4, vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=12,
    )  # fmt: skip
    model = hea.SparseTransformerForMaskedLM(config)
    before = model.model.embeddings.positions.table.weight
    after = with_random_positions(model, 5).model.embeddings.positions.table.weight
    assert torch.equal(after[:7], before[:7])  # two rows of RoBERTa's stand in front
    assert (after[7:] != before[7:]).all()
