"""The experiments, run as their users run them, at a tiny size; and the arithmetic under them."""

import json
import math
import runpy
import shutil
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from models_cases import TINY
from run_example import EXAMPLES, finish_example, refusal, start_forked
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    default_data_collator,
)

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.training import average_span, span_flops

SHAPE = ["--hidden_size", "16", "--num_hidden_layers", "2", "--num_attention_heads", "2"]
BLOCKS = [*SHAPE, "--vocab_size", "400", "--max_train_bytes", "150000", "--max_eval_blocks", "8", "--block_size", "32"]
BLOCKS += ["--max_steps", "4", "--batch_size", "2"]
LIMIT, SEGMENT = 48, 16
SPANS = [*SHAPE, "--train_file", "own.txt", "--span_limits", str(LIMIT), "--segment_bytes", str(SEGMENT)]
SPANS += ["--max_steps", "4", "--batch_size", "2"]
KINDS = ("fixed", "adaptive", "dynamic")
WORDS = ("the", "list", "of", "a", "file", "path", "returns", "opens", "value")


def results_of(folder: Path) -> dict:
    return json.loads((folder / "run" / "results.json").read_text())


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a comparison of blocks."""
    folder = tmp_path_factory.mktemp("blocks")
    return folder, finish_example(start_forked(folder, "experiments/compare_blocks.py", *BLOCKS))


def test_blocks_are_compared_saved_and_shown(blocks: tuple[Path, str]) -> None:
    folder, output = blocks
    results = results_of(folder)["models"]
    assert list(results) == ["gpt2", "pre_ln", "sas_p"]
    assert results["sas_p"]["parameters"] < results["pre_ln"]["parameters"] < results["gpt2"]["parameters"]
    for result in results.values():
        model = AutoModelForCausalLM.from_pretrained(folder / "run" / result["model"]).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder / "run" / result["model"])
        assert len(tokenizer) == 400
        assert model.num_parameters() == result["parameters"]
        assert result["reload_difference"] <= 1e-6
        assert result["train_tokens"] == 4 * 2 * 32
        assert result["eval_loss"] == min(entry["eval_loss"] for entry in result["history"] if "eval_loss" in entry)
        seconds = [entry["train_seconds"] for entry in result["history"]]
        assert seconds == sorted(seconds)
    assert (folder / "run" / "loss_curves.png").stat().st_size > 10_000
    # what a reader sees last fits on a screen
    last = output.rpartition("it/s]")[2].splitlines()
    assert len(last) <= 45
    best = min(results, key=lambda name: results[name]["eval_loss"])
    assert f"Lowest loss: {best}." in output
    # at another size than that of the search for learning rates nothing is said of its seeds
    assert "To compare fairly" in output


def test_bits_per_byte_count_the_bytes_of_the_text() -> None:
    from comparison.token_blocks import TokenBlocks

    from hf_efficient_attn.bench.text_blocks import cut, train_tokenizer

    text = "Ein Wort, naïve Größen; 日本語のテキスト.\n" * 4
    tokenizer = train_tokenizer([text] * 20, 400, 8)
    (row,) = cut([text], tokenizer, len(tokenizer(text).input_ids) + 1)
    first = len(tokenizer.convert_ids_to_tokens(row[0]))
    rows = Dataset.from_dict({"input_ids": [row]})
    data = TokenBlocks("a text", tokenizer, rows, rows)
    num_bytes = len(text.encode()) - first
    assert data.bits_per_byte_of_one_nat == pytest.approx((len(row) - 1) / (math.log(2) * num_bytes))


def test_a_resumed_comparison_ends_with_the_same_weights(blocks: tuple[Path, str], tmp_path: Path) -> None:
    """Of a run that was killed in the middle of its second model: its first checkpoint is all there is."""
    shutil.copytree(blocks[0] / "run", tmp_path / "run")
    killed = tmp_path / "run" / "sas_p"
    for path in killed.iterdir():
        shutil.rmtree(path) if path.is_dir() and path.name != "checkpoint-3" else path.is_file() and path.unlink()
    output = finish_example(start_forked(tmp_path, "experiments/compare_blocks.py", *BLOCKS, "--resume"))
    assert "pre_ln at learning rate 0.0" in output
    assert output.count("is finished") == 2
    assert "continued from checkpoint-3" in output
    expected, found = (load_file(folder / "run/sas_p/model.safetensors") for folder in (blocks[0], tmp_path))
    assert all((found[name] - expected[name]).abs().max() <= 1e-6 for name in expected)
    losses = [[entry.get("eval_loss") for entry in results_of(folder)["models"]["sas_p"]["history"]]
              for folder in (blocks[0], tmp_path)]  # fmt: skip
    assert losses[0] == losses[1]
    other = start_forked(tmp_path, "experiments/compare_blocks.py", *BLOCKS, "--resume", "--batch_size", "3")
    assert "--batch_size (was 2)" in refusal(other)


def test_the_best_of_several_rates_and_seeds_is_kept(tmp_path: Path) -> None:
    model = "v_skipinit,position_embedding_type=rope,mlp_bias=true"
    words = ["--models", model, "--learning_rates", "1e-4", "3e-3", "--seeds", "1", "2", *BLOCKS]
    finish_example(start_forked(tmp_path, "experiments/compare_blocks.py", *words))
    result = results_of(tmp_path)["models"][model]
    trials = [(tried["learning_rate"], tried["seed"]) for tried in result["tried"]]
    assert trials == [(1e-4, 1), (1e-4, 2), (3e-3, 1), (3e-3, 2)]
    assert result["eval_loss"] == min(tried["eval_loss"] for tried in result["tried"])
    best = f"lr_{result['learning_rate']:g}_seed_{result['seed']}"
    weights = [load_file(tmp_path / "run" / model / name / "model.safetensors") for name in ("", best)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / model).config
    assert (config.position_embedding_type, config.mlp_bias, config.hidden_act) == ("rope", True, "gelu_new")


def test_the_verdict_says_whether_seeds_tell_models_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    import compare_blocks

    args = compare_blocks.Arguments()
    bits = {"gpt2": (1.90, 1.92), "pre_ln": (1.96, 1.97), "sas_p": (1.91, 1.95)}
    tried = {name: [{"learning_rate": 0.1, "bits_per_byte": each} for each in of] for name, of in bits.items()}
    corpus = {"source": "a text"}
    models = {name: {"tried": of} for name, of in tried.items()}
    search = {"size": compare_blocks.size_of(args), "corpus": corpus, "models": models}
    monkeypatch.setattr(compare_blocks, "read_search", lambda: search)
    assert [compare_blocks.best_rate(model) for model in ("gpt2,n_head=2", "sas")] == [0.1, compare_blocks.PAPER_RATE]
    results = [
        {"model": name, "parameters": 100, "learning_rate": 0.1, "bits_per_byte": of[1], "tried": tried[name]}
        for name, of in bits.items()
    ]
    text = compare_blocks.verdict(args, corpus, results)
    assert "Lowest loss: gpt2. Bits per byte above it: sas_p 0.030, pre_ln 0.050." in text
    said = "gpt2 is ahead of pre_ln with every seed; the seeds do not tell gpt2 and sas_p apart."
    assert said in text
    # a run that ends otherwise than the search says so
    text = compare_blocks.verdict(args, corpus, [*results[:2], {**results[2], "bits_per_byte": 1.8}])
    assert "Lowest loss: sas_p." in text
    assert "This training disagrees" in text
    # on one's own text the search says nothing, but several seeds of the run do
    corpus = {"source": "own.txt"}
    assert "To compare fairly" in compare_blocks.verdict(
        args, corpus, [{**one, "tried": one["tried"][1:]} for one in results]
    )
    args.seeds = [1, 2]
    text = compare_blocks.verdict(args, corpus, results)
    assert "Lowest mean loss: gpt2. Bits per byte above it: sas_p 0.020, pre_ln 0.055." in text
    assert said in text
    # equal sizes and one rate need no remark; others do
    assert "sizes differ" not in text
    assert "try more rates" not in text
    results[1] |= {"parameters": 89, "tried": [*tried["pre_ln"], {"learning_rate": 0.2, "bits_per_byte": 2.0}]}
    text = compare_blocks.verdict(args, corpus, results)
    assert "gpt2 has 12% more weights than pre_ln." in text
    assert "The best rate of pre_ln is the lowest" in text
    results[1]["tried"] = tried["pre_ln"]
    unsearched = [*results[:2], {**results[2], "model": "sas"}]
    assert "No rate was searched for sas" in compare_blocks.verdict(args, corpus, unsearched)
    # without --learning_rates each model has a rate of its own
    table = compare_blocks.rates_table(
        [*results[:2], {"model": "sas", "tried": [{**tried["sas_p"][0], "learning_rate": 0.2}]}]
    )
    assert "| 1.910 (1.900 to 1.920) |" in table


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of spans; the last 600 of its 12,000 bytes are the test."""
    folder = tmp_path_factory.mktemp("spans")
    text = "".join(Random(0).choices(("naïve ", "span ", "日本 ", "reads ", "back\n"), k=3000)).encode()[:12_000]
    (folder / "own.txt").write_bytes(text)
    finish_example(start_forked(folder, "experiments/compare_spans.py", *SPANS))
    return folder


def test_bits_and_spans_are_those_of_the_saved_models(spans: Path) -> None:
    """A saved model, given whole rows at once, needs the bits reported for reading them segment by segment."""
    results = results_of(spans)
    assert results["data"] == {
        "source": "own.txt", "train_bytes": 10_800, "validation_bytes": 600, "test_bytes": 600
    }  # fmt: skip
    assert [result["span"] for result in results["models"].values()] == list(KINDS)
    rows = torch.tensor(list((spans / "own.txt").read_bytes()[-600:])).view(2, -1)
    read = (rows.shape[1] - 1) // SEGMENT * SEGMENT
    for name, result in results["models"].items():
        model = AutoModelForCausalLM.from_pretrained(spans / "run" / name).eval()
        with torch.no_grad():
            logits = model(input_ids=rows[:, :read]).logits
        nats = cross_entropy(logits.flatten(0, 1), rows[:, 1 : read + 1].flatten())
        assert result["bits_per_byte"] == pytest.approx(float(nats) / math.log(2), rel=1e-5)
        if result["span"] != "dynamic":
            assert result["average_span"] == average_span(model)
            assert result["flops_per_token"] == span_flops(model.config, average_span(model))
    kinds = {result["span"]: result for result in results["models"].values()}
    assert kinds["fixed"]["average_span"] == LIMIT > kinds["adaptive"]["average_span"]
    assert 32 < kinds["dynamic"]["average_span"] <= kinds["dynamic"]["max_span"] <= LIMIT
    assert "average_span" in kinds["adaptive"]["history"][0]


def test_a_token_of_the_saved_tokenizer_is_a_byte(spans: Path) -> None:
    text = "naïve  日本\n"
    tokenizer = AutoTokenizer.from_pretrained(spans / "run" / f"adaptive_{LIMIT}")
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_equal_time_lies_on_the_curve() -> None:
    from comparison.span_curves import add_equal_time

    curves = {"quick": [(1.0, 6.0), (2.0, 5.0)], "slow": [(1.0, 6.0), (3.0, 4.0), (9.0, 1.0)], "late": [(5.0, 3.0)]}
    kinds = {
        name: {
            "train_seconds": curve[-1][0],
            "history": [{"train_seconds": x, "eval_bits_per_byte": y} for x, y in curve] + [{"loss": 1.0}],
        }
        for name, curve in curves.items()
    }
    assert add_equal_time(kinds) == 2.0
    assert [result["bits_per_byte_at_equal_time"] for result in kinds.values()] == [5.0, 5.0, None]


def order_questions(num_entries: int, num_rows: dict[str, int]) -> DatasetDict:
    """Questions about short texts, in place of the dictionary's."""
    random, rows = Random(0), {split: [] for split in num_rows}
    for split, number in num_rows.items():
        for _ in range(number):
            names = random.sample([f"word{number}" for number in range(40)], num_entries)
            texts = [f"{name}: The {name} of {' '.join(random.choices(WORDS, k=9))}." for name in names]
            places = [
                sum(len(text) + 2 for text in texts[:entry]) + len(names[entry]) + 2 for entry in range(num_entries)
            ]
            first, second = sorted(random.sample(range(num_entries), 2))
            answer = texts[first].partition(": ")[2]
            rows[split].append(
                {
                    "question": f"Which comes first, {names[second]} or {names[first]}?",
                    "context": "\n\n".join(texts),
                    "answers": {"text": [answer], "answer_start": [places[first]]},
                    "other_start": places[second],
                }
            )
    return DatasetDict({split: Dataset.from_list(each) for split, each in rows.items()})


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of ways to read a text."""
    folder = tmp_path_factory.mktemp("answers")
    words = [*SHAPE, "--vocab_size", "300", "--tokens_per_step", "512", "--window_length", "64", "--doc_stride", "16"]
    words += ["--attention_window", "16", "--num_entries", "12", "--num_train", "20", "--num_validation", "6"]
    words += ["--seeds", "3", "4", "--seconds_per_model", "0.2", "--output_dir", str(folder / "run")]
    with pytest.MonkeyPatch.context() as patch:
        import compare_long_answers as experiment
        from comparison.run_folder import run_experiment

        patch.setattr(experiment, "order_questions", order_questions)
        patch.setattr(sys, "argv", ["compare_long_answers.py", *words])
        run_experiment(experiment.main, experiment.Arguments)
    return folder


def test_ways_to_read_a_text_are_compared(answers: Path) -> None:
    results = results_of(answers)
    assert list(results["models"]) == ["first", "windows", "dense", "band", "longformer", "bigbird"]
    assert len({one["parameters"] for several in results["seeds"].values() for one in several}) == 1
    for reading, several in results["seeds"].items():
        assert [one["seed"] for one in several] == [3, 4]
        assert several[0]["reload_difference"] <= 1e-5
        assert all(one["num_steps"] >= 1 and one["train_seconds"] >= 0.2 for one in several)
        model = AutoModelForQuestionAnswering.from_pretrained(answers / "run" / reading)
        assert (model.config.attention_pattern is None) == (reading in ("first", "windows", "dense"))
    assert results["tokens_of_a_text"] > 150
    assert (answers / "run" / "answers.png").stat().st_size > 10_000


def test_each_way_reads_what_it_says(answers: Path) -> None:
    import compare_long_answers as experiment

    args = experiment.Arguments(window_length=64, doc_stride=16)
    data = order_questions(12, {"train": 5, "validation": 5})
    tokenizer = AutoTokenizer.from_pretrained(answers / "run" / "dense")
    windows, texts = (experiment.encode(args, data, tokenizer, length) for length in (64, 1_000_000))
    run = experiment.Run(args, answers, tokenizer, data, windows, texts)
    read = {reading: run.inputs(reading, "validation") for reading in ("first", "windows", "dense")}
    assert read["first"]["row"][:] == read["dense"]["row"][:] == [0, 1, 2, 3, 4]
    assert max(map(len, read["windows"]["input_ids"])) == 64 < min(map(len, read["dense"]["input_ids"]))
    firsts = [read["windows"]["row"][:].index(row) for row in range(5)]
    assert read["first"]["input_ids"][:] == [read["windows"]["input_ids"][place] for place in firsts]
    # the true answers have all points, wherever the entries are
    scores = experiment.scores(run, [answer["text"][0] for answer in data["validation"]["answers"]])
    assert set(scores.values()) == {100.0}


def test_training_stops_before_a_loss_that_is_not_finite_reaches_the_weights(tmp_path: Path) -> None:
    from comparison.training import ClockedTrainer, training_arguments

    model = AutoModelForCausalLM.from_config(hea.SimplifiedTransformerConfig(**TINY))
    calls, weights = [], {}

    def spoil(module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            weights.update({name: each.clone() for name, each in module.state_dict().items()})
            outputs["loss"] = outputs["loss"] * float("nan")
        return outputs

    model.register_forward_hook(spoil)
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8
    trainer = ClockedTrainer(
        model=model,
        args=training_arguments(tmp_path, 0, max_steps=6, per_device_train_batch_size=2, use_cpu=True),
        train_dataset=rows,
        data_collator=default_data_collator,
    )
    with pytest.raises(SystemExit, match="The loss is nan at step 3: try a lower learning rate"):
        trainer.run()
    assert len(calls) == 3
    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())


BAD_INPUTS = {
    "block": (
        "blocks",
        ["--models", "pre_ln", "sasp,is_causal=true"],
        "--models sasp is unknown. Allowed: gpt2, pre_ln",
    ),
    "heads": ("blocks", ["--num_attention_heads", "5"], "5"),
    "no text": ("blocks", ["--max_train_bytes", "1"], "--max_train_bytes 1"),
    "kind": ("spans", ["--spans", "adaptative"], "--spans adaptative is unknown. Allowed: fixed, adaptive, dynamic"),
    "network": ("spans", ["--network", "vanilla"], "authors, modern"),
    "no file": ("spans", ["--train_file", "nowhere"], "--train_file nowhere: no such file"),
    "little text": ("spans", ["--train_file", "small"], "5% are for validation and as many for the test"),
    "odd window": ("long_answers", ["--attention_window", "7"], "must be even"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_inputs_are_refused_in_one_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, arguments, sentence = BAD_INPUTS[name]
    (tmp_path / "small").write_bytes(b"few bytes")
    file = EXAMPLES / f"experiments/compare_{script}.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_EFFICIENT_ATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", [str(file), "--output_dir", "run", *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(file), run_name="__main__")
    (line,) = str(stop.value).splitlines()
    assert sentence in line


def test_a_folder_with_a_run_is_not_overwritten(spans: Path) -> None:
    assert "already holds a run" in refusal(start_forked(spans, "experiments/compare_spans.py", *SPANS))
