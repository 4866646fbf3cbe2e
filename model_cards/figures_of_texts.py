"""Tables of what the examples that write texts have learned, for `figures.py`."""

from typing import Any

from hf_efficient_attn.bench.harness.report import machine_line, markdown_table


def summaries(found: dict[str, Any]) -> str:
    """Return ROUGE of the summaries beside that of the first words, and five summaries."""
    rows = {"the first 12 words": "{}_of_first_words", "the model": "eval_{}"}
    lines = [
        [name, *(f"{found['metrics'][key.format(rouge)]:.3f}" for rouge in ("rouge1", "rouge2", "rougeL"))]
        for name, key in rows.items()
    ]
    scores = markdown_table(["summaries", "ROUGE-1", "ROUGE-2", "ROUGE-L"], lines)
    samples = [
        [_cell(row["text"], 200), *(_cell(row[name], 60) for name in ("summary", "untrained", "trained"))]
        for row in found["samples"]
    ]
    table = markdown_table(["text", "wanted", "untrained", "trained"], samples)
    return f"{scores}\n\n{_conditions(found)}\n\n{table}"


def translations(found: dict[str, Any]) -> str:
    """Return BLEU and chrF of the translations beside those of the untranslated sources."""
    rows = {"the English as it is": "{}_of_sources", "the model": "eval_{}"}
    lines = [
        [name, *(f"{found['metrics'][key.format(score)]:.1f}" for score in ("bleu", "chrf"))]
        for name, key in rows.items()
    ]
    return f"{markdown_table(['translations', 'BLEU', 'chrF'], lines)}\n\n{_conditions(found)}"


def _conditions(found: dict[str, Any]) -> str:
    """Return how long the run took on what."""
    took = f"{found['metrics']['epoch']:.1f} epochs, {found['cpu_seconds']:,.0f} CPU seconds of the run"
    return f"*`{found['command']}`: {took}; {machine_line(found['machine'])}. {found['note']}".strip() + "*"


def _cell(text: str, num_characters: int) -> str:
    """Return a text that stays within its cell of a table, cut after so many characters."""
    short = text if len(text) <= num_characters else f"{text[:num_characters]}…"
    return " ".join(short.replace("|", "\\|").replace("<", "&lt;").replace("�", "?").split())
