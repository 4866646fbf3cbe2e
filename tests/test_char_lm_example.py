"""examples/train_char_lm.py, run as its users run it, at a tiny size; and the arithmetic under it."""

import json
import math
from pathlib import Path
from random import Random

import pytest
import torch
from run_example import EXAMPLES, check_refusals, finish_example, refusal, start_forked, write_rows
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline, set_seed

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.costs import average_span, max_span, span_flops

KINDS = ("fixed", "adaptive", "dynamic")
LIMIT, SEGMENT, ROWS = 48, 16, 4
WORDS = ("naïve ", "span ", "日本 ", "reads ", "back\n")
TINY = ["--train_file", "own.txt", "--span_limit", str(LIMIT), "--segment_bytes", str(SEGMENT), "--max_steps", "6"]
TINY += ["--per_device_train_batch_size", "2", "--per_device_eval_batch_size", str(ROWS), "--disable_tqdm", "True"]
TINY += ["--config_overrides", "hidden_size=16,intermediate_size=32,num_hidden_layers=2,num_attention_heads=2"]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def write_text(folder: Path) -> bytes:
    """Write 12,000 bytes; of these the last 600 are the test."""
    text = "".join(Random(0).choices(WORDS, k=3000)).encode()[:12_000]
    (folder / "own.txt").write_bytes(text)
    return text


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a run from start to end."""
    folder = tmp_path_factory.mktemp("finished")
    write_text(folder)
    return folder, finish_example(start_forked(folder, "train_char_lm.py", *TINY))


def results_of(folder: Path) -> dict:
    return json.loads((folder / "run" / "results.json").read_text())


def test_every_promised_file_is_there(finished: tuple[Path, str]) -> None:
    folder, output = finished
    assert {"results.md", "curves.png", *KINDS} <= {file.name for file in (folder / "run").iterdir()}
    results = results_of(folder)
    assert tuple(results["kinds"]) == KINDS
    assert results["data"] == {
        "source": "own.txt", "train_bytes": 10_800, "validation_bytes": 600, "test_bytes": 600
    }  # fmt: skip
    for kind, result in results["kinds"].items():
        assert f"{kind} attention span" in (folder / "run" / kind / "README.md").read_text()
        assert result["num_steps"] == 6
        assert result["train_tokens"] == 6 * 2 * SEGMENT
        assert result["reload_difference"] <= 1e-6
        assert result["peak_bytes"] > 0
        assert len([entry for entry in result["history"] if "eval_bits_per_byte" in entry]) == 6
    assert "multiply-adds/byte" in output


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_one_pass_over_each_row(finished: tuple[Path, str], kind: str) -> None:
    """The saved model, given whole rows at once, needs the bits reported for reading them segment by segment."""
    folder, _ = finished
    model = AutoModelForCausalLM.from_pretrained(folder / "run" / kind).eval()
    rows = torch.frombuffer(bytearray(write_text(folder)[-600:]), dtype=torch.uint8).view(ROWS, -1).long()
    read = (rows.shape[1] - 1) // SEGMENT * SEGMENT
    assert read > 2 * LIMIT
    with torch.no_grad():
        logits = model(input_ids=rows[:, :read]).logits
    nats = cross_entropy(logits.flatten(0, 1), rows[:, 1 : read + 1].flatten())
    assert results_of(folder)["kinds"][kind]["bits_per_byte"] == pytest.approx(float(nats) / math.log(2), rel=1e-5)


def test_reported_spans_are_those_of_the_saved_models(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    kinds = results_of(folder)["kinds"]
    for kind in ("fixed", "adaptive"):
        model = AutoModelForCausalLM.from_pretrained(folder / "run" / kind)
        assert kinds[kind]["average_span"] == average_span(model)
        assert kinds[kind]["max_span"] == max_span(model)
        assert kinds[kind]["flops_per_token"] == span_flops(model.config, average_span(model))
    assert kinds["fixed"]["average_span"] == LIMIT > kinds["adaptive"]["average_span"]
    assert 32 < kinds["dynamic"]["average_span"] <= kinds["dynamic"]["max_span"] <= LIMIT
    assert kinds["adaptive"]["parameters"] - kinds["fixed"]["parameters"] == 4


def test_all_kinds_start_alike() -> None:
    weights = []
    for kind in KINDS:
        set_seed(3)
        config = hea.AdaptiveSpanConfig(span=kind, vocab_size=256, hidden_size=16, num_hidden_layers=1)
        state = hea.AdaptiveSpanForCausalLM(config).state_dict()
        weights.append({name: tensor for name, tensor in state.items() if ".spans." not in name})
    for other in weights[1:]:
        assert all(torch.equal(weights[0][name], other[name]) for name in weights[0])


def test_saved_model_continues_text(finished: tuple[Path, str]) -> None:
    """A token of the saved tokenizer is a byte, and a pipeline loads the folder."""
    folder, _ = finished
    saved = str(folder / "run" / "adaptive")
    text = "naïve  日本\n"
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    generate = pipeline("text-generation", model=saved, device="cpu")
    options = {"max_new_tokens": 60, "do_sample": False, "return_full_text": False}
    said = generate("span ", **options)[0]["generated_text"]
    model, ids = AutoModelForCausalLM.from_pretrained(saved).eval(), list(b"span ")
    for _ in range(60):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert said == tokenizer.decode(ids[5:])


def test_other_optimizer_network_and_kinds(tmp_path: Path) -> None:
    write_text(tmp_path)
    words = ["--optimizer", "adagrad", "--network", "modern", "--spans", "adaptive", "--span_learning_rate", "0.05"]
    output = finish_example(start_forked(tmp_path, "train_char_lm.py", *TINY, *words))
    results = results_of(tmp_path)
    assert list(results["kinds"]) == ["adaptive"]
    assert "steps by adagrad" in output
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "adaptive").config
    assert (config.norm_position, config.position_embedding_type) == ("pre", "rope")
    again = start_forked(tmp_path, "train_char_lm.py", *TINY)
    assert "already holds a run" in refusal(again)


def test_optimizers_of_the_kinds(examples: None) -> None:
    """Adagrad at the paper's rates; AdamW with a rate of its own for spans that learn."""
    from char_lm.char_lm_arguments import CharTrainingArguments, ModelArguments
    from char_lm.char_lm_training import build_optimizer

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    for name, rates in (("adagrad", [0.07, 0.07, 0.07]), ("adamw", [2e-3, 2e-3, 5e-3])):
        training = CharTrainingArguments(optimizer=name, max_steps=100, use_cpu=True)
        for kind in KINDS:
            config = ModelArguments().config(kind)
            config.update(shape)
            optimizer, schedule = build_optimizer(hea.AdaptiveSpanForCausalLM(config), training)
            initial = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
            assert initial == rates[: 2 if kind == "fixed" else 3]
            assert (schedule is None) == (name == "adamw")
        assert training.warmup_steps == 10
        assert training.max_grad_norm == (0.0 if name == "adagrad" else 1.0)


def test_equal_time_lies_on_the_curve(examples: None) -> None:
    from char_lm.char_lm_report import add_equal_time

    curves = {"quick": [(1.0, 6.0), (2.0, 5.0)], "slow": [(1.0, 6.0), (3.0, 4.0), (9.0, 1.0)], "late": [(5.0, 3.0)]}
    kinds = {
        name: {
            "train_seconds": curve[-1][0],
            "history": [{"train_seconds": x, "eval_bits_per_byte": y} for x, y in curve] + [{"loss": 1.0}],
        }
        for name, curve in curves.items()
    }
    add_equal_time(kinds)
    assert [result["bits_per_byte_at_equal_time"] for result in kinds.values()] == [5.0, 5.0, None]


def test_default_text_is_the_standard_library(examples: None) -> None:
    from char_lm.char_lm_arguments import DataArguments
    from char_lm.char_lm_data import load_bytes

    data = DataArguments(max_train_bytes=100_000, max_eval_bytes=3000, max_test_bytes=5000)
    texts = load_bytes(data)
    assert {name: len(text) for name, text in texts.items()} | {"train": 0} == {
        "train": 0, "validation": 3000, "test": 5000
    }  # fmt: skip
    assert 0 < len(texts["train"]) <= 100_000
    assert b"import" in bytes(texts["train"].tolist())
    pieces = {bytes(texts[name][:2000].tolist()) for name in texts}
    assert len(pieces) == 3


BAD_INPUTS = {
    "kind": (["--spans", "fixed", "adaptative"], "--spans adaptative is unknown. Allowed: fixed, adaptive, dynamic"),
    "network": (["--network", "vanilla"], "authors, modern"),
    "optimizer": (["--optimizer", "sgd"], "adagrad, adamw"),
    "missing file": (["--train_file", "nowhere"], "nowhere: no such file"),
    "little text": (["--train_file", "small"], "tokens do not fill one segment"),
    "wrong field": (["--config_overrides", "hidn=2"], "hidn"),
    "shuffled": (["--train_sampling_strategy", "random"], "must be sequential"),
    "no column": (["--dataset_name", "rows", "--text_column_name", "body"], "has no column body. Columns: text"),
    "null text": (["--dataset_name", "nulls"], "split train, row 2: column text is null"),
    "unknown option": (["--span_limmit", "64"], "Did you mean '--span_limit'?"),
    "no steps": (["--max_steps", "0"], "at least 1"),
}


def write_bad_texts(folder: Path) -> None:
    (folder / "small").write_bytes(b"few bytes")
    (folder / "rows").mkdir()
    write_rows(folder / "rows" / "train.jsonl", [{"text": "a document"}] * 20)
    (folder / "nulls").mkdir()
    write_rows(folder / "nulls" / "train.jsonl", [{"text": "a document"}, {"text": None}])


def test_bad_inputs_are_refused_in_one_line(tmp_path: Path) -> None:
    bad = {name: ("train_char_lm.py", arguments, message) for name, (arguments, message) in BAD_INPUTS.items()}
    check_refusals(tmp_path, bad, write_bad_texts)
    assert not list(tmp_path.rglob("model.safetensors"))
