"""`examples/run_sentence_embeddings.py`, started as its users do, on a tiny model and pairs of its own."""

import json
from pathlib import Path

import pytest
from run_example import finish_example, start_forked, write_rows
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, BertModel
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea

SCRIPT = "run_sentence_embeddings.py"
ARGUMENTS = ("--model_name_or_path", "model", "--train_file", "pairs.jsonl", "--max_seq_length", "64")
SMALL = (
    "--short_seq_length",
    "16",
    "--attention_window",
    "8",
    "--per_device_train_batch_size",
    "8",
    "--learning_rate",
    "1e-3",
)


def write_files(folder: Path) -> None:
    """Write a model of 16 positions, and pairs: a document names what it is about behind its sixteenth token."""
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    BertModel(config).save_pretrained(folder / "model")
    word_tokenizer(64).save_pretrained(folder / "model")
    pairs = [{"query": f"w{n}", "document": " ".join(["w50"] * 20 + [f"w{n}"] * 20)} for n in range(40)]
    write_rows(folder / "pairs.jsonl", pairs)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of 8 epochs."""
    folder = tmp_path_factory.mktemp("embeddings")
    write_files(folder)
    finish_example(start_forked(folder, SCRIPT, *ARGUMENTS, *SMALL, "--num_train_epochs", "8"))
    return folder


def test_training_on_long_documents_finds_them(finished: Path) -> None:
    metrics = json.loads((finished / "run" / "eval_results.json").read_text())
    for what in ("short_model_16_tokens", "before_training", "after_training_16_tokens", "after_training"):
        assert 0 <= metrics[f"{what}_accuracy@1"] <= metrics[f"{what}_mrr@10"] <= 1
    # all documents begin alike
    assert metrics["after_training_mrr@10"] > metrics["after_training_16_tokens_mrr@10"]


def test_the_saved_folder_loads_and_reads_what_is_long(finished: Path) -> None:
    model = SentenceTransformer(str(finished / "run"), device="cpu")
    assert isinstance(model[0].model.config, hea.SparseTransformerConfig)
    assert model.max_seq_length == 64
    one, other = model.encode([" ".join(["w50"] * 30 + [word]) for word in ("w1", "w2")])
    assert (one != other).any()


def test_its_last_checkpoint_is_complete(finished: Path) -> None:
    """From which it would go on; that of sentence-transformers lies in other files than Trainer's."""
    checkpoints = sorted(finished.glob("run/checkpoint-*"), key=lambda folder: int(folder.name[11:]))
    assert hea.last_complete_checkpoint(str(finished / "run")) == str(checkpoints[-1])
