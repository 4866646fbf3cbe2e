"""Tables of the card of trees, for `figures.py`."""

from typing import Any

from hf_efficient_attn.bench.harness.report import machine_line, markdown_table


def classified(found: dict[str, Any]) -> str:
    """Return how well the models of `compare_trees.py` tell spam, by length, and what they cost."""
    lengths, chance = list(found["models"]), found["most_frequent_class"]["accuracy"]
    names = list(found["models"][lengths[0]])
    cells = {length: [_cells(found["models"][length][name]) for name in names] for length in lengths}
    lines = [[name, *(cell for length in lengths for cell in cells[length][row])] for row, name in enumerate(names)]
    bags = [cell for length in lengths for cell in ("–", f"{found['bag_of_words'][length]['accuracy']:.3f}", "–")]
    header = [f"{title} {int(length):,}" for length in lengths for title in ("scores a token,", "accuracy,", "steps,")]
    seconds, data = found["settings"]["seconds_per_model"], found["data"]
    return f"""{markdown_table(["first tokens:", *header], [*lines, ["bag of words", *bags]])}

{data["train_documents"]:,} mails to train on, {data["test_documents"]:,} to test on; always naming the most frequent \
class: {chance:.3f}. {seconds:g} seconds of training for each; {len(found["settings"]["seeds"])} seed(s). \
`{found["command"]}`. {found.get("note", "")} *{machine_line(found["machine"])}*

![Accuracy by density, and the sizes of the nodes that a tree reads](pictures/compare_trees.png)"""


def _cells(result: dict[str, Any]) -> list[str]:
    accuracy = next(iter(result["scores"].values()))["accuracy"]
    return [f"{result['pairs_per_token']:,.0f}", f"{accuracy:.3f}", f"{result['num_steps']:,.0f}"]
