"""Tables of the star's card, for `figures.py`."""

from typing import Any

from hf_efficient_attn.bench.harness.report import machine_line, markdown_table
from hf_efficient_attn.bench.harness.seeds import spread


def masked_summation(found: dict[str, Any]) -> str:
    """Return the errors of `masked_summation.py` by length."""
    networks, (shortest, longest) = found["networks"], found["train_lengths"]
    first = next(iter(networks.values()))
    lengths = [f"{int(length):,}" for length in first["errors"]]
    errors = [[name, f"{row['parameters']:,}", *map(spread, row["errors"].values())] for name, row in networks.items()]
    num_seeds, num_steps = len(next(iter(first["errors"].values()))), first["num_steps"]
    return f"""{markdown_table(["error by number of vectors", "parameters", *lengths], errors)}

The sum of {found["num_marked"]} marked vectors, after {num_steps:,} steps on {shortest:,} to {longest:,} vectors. The \
error is over that of always saying the expected sum; {num_seeds} seed{"s" * (num_seeds > 1)}. `star` is \
`StarTransformerForSequenceClassification`, `dense` and `lstm` are torch's. `{found["command"]}`. \
*{machine_line(found["machine"])}*"""
