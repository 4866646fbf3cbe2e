"""examples/run_translation.py, run as its users run it, on a few sentences."""

import json
from pathlib import Path

import pytest
from run_example import finish_example, start_forked, write_rows
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import hf_efficient_attn as hea

SCRIPT = "run_translation.py"
TINY = [
    "--train_file",
    "pairs.jsonl",
    "--target_lang",
    "fr",
    "--max_target_length",
    "12",
    "--generation_num_beams",
    "2",
]
TINY += ["--disable_tqdm", "True", "--logging_steps", "1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a run has left `run`."""
    folder = tmp_path_factory.mktemp("translation")
    rows = [{"translation": {"en": f"Open the file {i}.", "fr": f"Ouvrez le fichier {i}."}} for i in range(40)]
    write_rows(folder / "pairs.jsonl", rows)
    output = finish_example(start_forked(folder, SCRIPT, *TINY, "--num_train_epochs", "1"))
    assert all(output.count(f"\n{name}: ") == 4 for name in ("source", "target", "written"))
    return folder


def test_it_measures_what_the_model_and_the_sources_reach(finished: Path) -> None:
    results = json.loads((finished / "run" / "all_results.json").read_text())
    assert results["epoch"] == 1
    assert 0 <= results["eval_bleu"] <= results["bleu_of_sources"]
    assert results["chrf_of_sources"] > 10


def test_the_model_that_is_left_is_the_transformer_of_2017(finished: Path) -> None:
    model, tokenizer = (kind.from_pretrained(finished / "run") for kind in (AutoModelForSeq2SeqLM, AutoTokenizer))
    assert isinstance(model, hea.SparseSeq2SeqForConditionalGeneration)
    config = model.config
    assert (config.norm_position, config.position_embedding_type, config.label_smoothing) == ("post", "sinusoidal", 0.1)
    row = json.loads((finished / "run" / "samples.jsonl").read_text("utf-8").splitlines()[0])
    written = model.generate(**tokenizer(row["source"], return_tensors="pt"))
    assert tokenizer.decode(written[0], skip_special_tokens=True) == row["written"]


def test_it_resumes_on_the_schedule_of_noam(finished: Path) -> None:
    finish_example(start_forked(finished, SCRIPT, *TINY, "--max_steps", "6", "--warmup_steps", "4", "--resume"))
    history = json.loads((finished / "run" / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    rates = {entry["step"]: entry["learning_rate"] for entry in history if "learning_rate" in entry}
    assert list(rates) == [1, 2, 3, 4, 5, 6]
    assert rates[5] == pytest.approx(2.2e-3)  # that of the fourth update is logged with the fifth
    assert rates[6] == pytest.approx(2.2e-3 * (4 / 5) ** 0.5)
