"""Tables of the card of trees, for `figures.py`."""

from typing import Any

from hf_efficient_attn.bench.harness.report import machine_line, markdown_table


def classified(found: dict[str, Any]) -> str:
    """Return how well the models of `compare_trees.py` tell spam, by length, and what they cost, with the picture."""
    return f"""{compared(found)}

![Accuracy by density, and the sizes of the nodes that a tree reads](pictures/compare_trees.png)"""


def compared(found: dict[str, Any]) -> str:
    """Return the same without the picture; at equal time and, where the run has it, at equal steps."""
    seconds, data = found["settings"]["seconds_per_model"], found["data"]
    table, chance = _table(found, "models"), found["most_frequent_class"]["accuracy"]
    has_steps = found.get("models_at_equal_steps")
    same = f"At equal steps:\n\n{_table(found, 'models_at_equal_steps')}\n\n" if has_steps else ""
    return f"""{table}

{same}{data["train_documents"]:,} mails to train on, {data["test_documents"]:,} to test on; always naming the most \
frequent class: {chance:.3f}. {seconds:g} seconds of training for each; {len(found["settings"]["seeds"])} seed(s). \
`{found["command"]}`. {found.get("note", "")} *{machine_line(found["machine"])}*"""


def _table(found: dict[str, Any], key: str) -> str:
    lengths = list(found[key])
    names = list(found[key][lengths[0]])
    cells = {length: [_cells(found[key][length][name]) for name in names] for length in lengths}
    lines = [[name, *(cell for length in lengths for cell in cells[length][row])] for row, name in enumerate(names)]
    bags = [cell for length in lengths for cell in ("–", f"{found['bag_of_words'][length]['accuracy']:.3f}", "–")]
    header = [f"{title} {int(length):,}" for length in lengths for title in ("scores a token,", "accuracy,", "steps,")]
    return markdown_table(["first tokens:", *header], [*lines, ["bag of words", *bags]])


def _cells(result: dict[str, Any]) -> list[str]:
    accuracy = next(iter(result["scores"].values()))["accuracy"]
    return [f"{result['pairs_per_token']:,.0f}", f"{accuracy:.3f}", f"{result['num_steps']:,.0f}"]
