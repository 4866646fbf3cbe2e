"""What the docstrings of the examples promise is what their default runs have measured, where results are committed."""

import ast
import json
from pathlib import Path

import pytest
from run_example import EXAMPLES

RESULTS = sorted((EXAMPLES.parent / "model_cards" / "examples").glob("run_*.json"))
# what the docstring says, by the name of the results
SAYS = {
    "run_classification": ["an accuracy near {eval_accuracy:.2f}", "{minutes:.0f} minutes of one core"],
    "run_token_classification": [
        "an accuracy of {eval_accuracy:.3f} and a macro F1 of {eval_f1_macro:.3f}",
        "{minutes:.0f} minutes of one core",
    ],
    "run_clm": ["to {bits_per_byte:.2f} bits per byte", "{minutes:.0f} minutes of one core"],
    "run_mlm": ["{eval_loss:.1f} nats a masked token", "where token frequencies give {loss_of_frequencies:.1f}"],
    "run_qa": [
        "an F1 near {eval_f1:.0f}; the text's first sentence has {f1_of_first_sentence:.0f}",
        "{minutes:.0f} minutes of one core",
    ],
    "run_qa_512": ["`--max_seq_length 512`, in windows, has {eval_f1:.0f}"],
    "run_summarization": ["ROUGE-L {eval_rougeL:.2f}; the first 12 words have {rougeL_of_first_words:.2f}"],
    "run_translation": [
        "in {minutes:.0f} minutes of one core",
        "BLEU {eval_bleu:.1f}, chrF {eval_chrf:.1f}",
        "the English as it is has {bleu_of_sources:.1f} and {chrf_of_sources:.1f}",
    ],
}


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_docstring_says_what_was_measured(file: Path) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    script = EXAMPLES.parent / found["command"].split()[1]
    words = " ".join(ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))).split())
    for template in SAYS[file.stem]:
        said = template.format(minutes=found.get("cpu_seconds", 0) / 60, **found["metrics"])
        assert said in words
