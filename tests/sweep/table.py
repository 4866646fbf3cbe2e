"""The sweep's verdicts, and the table of them, which `python -m sweep.table` writes into `model_cards/engine.md`."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from sweep.verdict import NOT_BUILT, RIGHT

VERDICTS = Path(__file__).with_name("verdicts.json")
PAGE = Path(__file__).parents[2] / "model_cards" / "engine.md"
BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
# why a class is refused, by what its sentence says; the first that fits
REASONS = (
    ("has attention sinks", "has attention sinks that differ from query to query"),
    ("uses attention masks itself", "uses masks outside of its attention function"),
    ("counts blocks of keys from", "padding on the left, from which it would count its blocks; all else is right"),
    ("has full attention", "every layer is sliding, chunked, indexed or recurrent by itself"),
    ("does not use the attention interface", "does not use the attention interface, or not in every layer"),
    ("computed without its attention_pattern", "does not use the attention interface, or not in every layer"),
    ("has sliding attention but does not", "does not say how far its sliding layers attend"),
    ("mask is not one of", "its masks are not made of positions"),
    ("none of the fields", "its config does not say how many layers it has"),
    ("two models, each with", "two models in one: sparsify `model.encoder` or `model.decoder`"),
)
SUFFIXES = re.compile(r"(For[A-Z].*|(With)?LMHeadModel|ModelWithLMHead|Model|Decoder)$")


def verdicts() -> dict[str, Any]:
    """Return the committed verdicts."""
    table: dict[str, Any] = json.loads(VERDICTS.read_text())
    return table


def markdown(table: dict[str, Any]) -> str:
    """Return the table."""
    tried = [each for each in table["classes"] if each["sparse"] != NOT_BUILT]
    found: dict[str, set[str]] = defaultdict(set)
    for each in tried:
        found[SUFFIXES.sub("", each["name"])].add(meaning(each))
    names: dict[str, set[str]] = defaultdict(set)
    for each in tried:
        short = SUFFIXES.sub("", each["name"])
        names[meaning(each)].add(short if len(found[short]) == 1 else each["name"])
    lines = [
        f"{len(tried)} classes of transformers {table['transformers']}, each tiny and with random weights against its "
        "own eager attention: outputs, left padding, whom the last token reaches, decoding with a cache. "
        f"{len(table['classes']) - len(tried)} more could not be built tiny, or need libraries that were missing.",
        "",
        "| with `attention_pattern` | models |",
        "|---|---|",
    ]
    for what in sorted(names, key=lambda each: (not each.startswith(RIGHT), -len(names[each]))):
        lines.append(f"| {what} | {len(names[what])}: {', '.join(sorted(names[what], key=str.lower))} |")
    return "\n".join(lines)


def meaning(verdict: dict[str, str]) -> str:
    """Return in a few words what the table says of a class with a pattern."""
    if verdict["sparse"] == RIGHT:
        return f"{RIGHT}: every layer with full attention follows it"
    # what cannot be computed at all says more than what has no layer for a pattern
    sentence = verdict["own_reason"] or verdict["sparse_reason"]
    reason = next((says for part, says in REASONS if part in sentence), sentence)
    plain = " (without a pattern right)" if verdict["own"] == RIGHT else ""
    return f"{verdict['sparse']}{plain}: {reason}"


def main() -> None:
    """Write the table between its marks in the card."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{markdown(verdicts())}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
