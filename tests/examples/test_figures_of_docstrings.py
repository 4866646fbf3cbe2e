"""What the docstrings of examples and experiments promise is what committed runs of them have measured."""

import ast
import json
import re
from pathlib import Path

import pytest
from run_example import EXAMPLES

RESULTS = EXAMPLES.parent / "model_cards" / "results"
SCRIPTS = [*sorted(EXAMPLES.glob("*.py")), *sorted(EXAMPLES.glob("experiments/*.py"))]
# what only a run can tell: a decimal number, or how long a core computes
FIGURE = re.compile(r"(?<![\d.,])\d+\.\d+(?! MB)|\w+ minutes of one core")
# what the docstring says, by the name of the results; those that end with _evaluated are of the model that the run
# before them has trained
SAYS = {
    "run_classification": [
        "an accuracy near {eval_accuracy:.2f}",
        "{minutes:.0f} minutes of one core",
    ],
    "run_classification_evaluated": ['"never spam" has {accuracy_of_most_frequent:.2f}'],
    "run_token_classification": [
        "an accuracy of {eval_accuracy:.3f} and a macro F1 of {eval_f1_macro:.3f}",
        "{minutes:.0f} minutes of one core",
    ],
    "run_token_classification_evaluated": [
        "each name's most frequent kind has an accuracy of {accuracy_of_most_frequent:.3f}"
    ],
    "run_token_classification_512": [
        "`--max_seq_length 512 --per_device_train_batch_size 4` has {eval_accuracy:.3f} and {eval_f1_macro:.3f}"
    ],
    "run_clm": [
        "to {bits_per_byte:.2f} bits per byte of held-out files",
        "{minutes:.0f} minutes of one core",
    ],
    "run_clm_evaluated": ["which `xz -9` packs into {bits_per_byte_of_xz:.2f}"],
    "run_mlm": [
        "{minutes:.0f} minutes of one core: {eval_loss:.1f} nats a masked token",
        "where token frequencies give {loss_of_frequencies:.1f}",
    ],
    "run_qa": [
        "an F1 near {eval_f1:.0f}; the text's first sentence has {f1_of_first_sentence:.0f}",
        "{minutes:.0f} minutes of one core",
    ],
    "run_qa_512": ["`--max_seq_length 512`, in windows, has {eval_f1:.0f}"],
    "run_summarization": [
        "in {minutes:.0f} minutes of one core",
        "ROUGE-L {eval_rougeL:.2f}; the first 12 words have {rougeL_of_first_words:.2f}",
    ],
    "run_translation": [
        "in {minutes:.0f} minutes of one core",
        "BLEU {eval_bleu:.1f}, chrF {eval_chrf:.1f}",
        "the English as it is has {bleu_of_sources:.1f} and {chrf_of_sources:.1f}",
    ],
    "run_lora": [
        "is {dense_perplexity:.1f} before, {sparse_perplexity:.1f} with so narrow a pattern, and "
        "{sparse_lora_perplexity:.1f} after 64 blocks of 512 tokens: {minutes:.0f} minutes of one core",
    ],
    "run_sentence_embeddings": [
        "{short_model_512_tokens_mrr@10:.2f} for the short model, which reads 512 tokens",
        "{before_training_mrr@10:.2f} for the long one, and {after_training_mrr@10:.2f} after training",
        "or {after_training_512_tokens_mrr@10:.2f} where that reads 512 tokens alone",
    ],
    "compare_blocks": [
        "Expect {blocks[pre_ln][tried][0][bits_per_byte]:.2f} and {blocks[sas_p][tried][0][bits_per_byte]:.2f} bits",
        "`sas_p` at 3e-3: {blocks[sas_p][tried][1][bits_per_byte]:.2f} bits per byte",
    ],
    "compare_spans": [
        "{kinds[fixed][bits_per_byte]:.2f} (fixed), {kinds[adaptive][bits_per_byte]:.2f} (adaptive) and "
        "{kinds[dynamic][bits_per_byte]:.2f} (dynamic)",
        "{kinds[adaptive][average_span]:.0f} and about 100 bytes",
    ],
    "compare_spans_fixed_64": ["a fixed one of 64 reaches {kinds[fixed][bits_per_byte]:.2f}"],
}


def said(name: str) -> list[str]:
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    fields = {**found, **found.get("metrics", {}), "minutes": found.get("cpu_seconds", 0) / 60}
    return [template.format_map(fields) for template in SAYS[name]]


def docstring(script: Path) -> str:
    return ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", SAYS)
def test_a_docstring_says_what_was_measured(name: str) -> None:
    command = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["command"]
    words = " ".join(docstring(EXAMPLES.parent / command.split()[1]).split())
    for sentence in said(name):
        assert sentence in words


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_all_figures_of_a_docstring_were_measured(script: Path) -> None:
    # commands are indented
    prose = " ".join(" ".join(re.findall(r"^(?!    ).+", docstring(script), re.MULTILINE)).split())
    prose = re.sub(r"arXiv:[\d.]+|Python 3\.\d+", "", prose)
    for name in SAYS:
        if name.startswith(script.stem):
            for sentence in said(name):
                prose = prose.replace(sentence, "")
    assert FIGURE.findall(prose) == []
