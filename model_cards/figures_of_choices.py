"""Tables of what the experiments with keys chosen by content have measured, for `figures.py`."""

from typing import Any

from hf_efficient_attn.bench.harness.report import machine_line, markdown_table
from hf_efficient_attn.bench.harness.seeds import spread


def copied_symbols(found: dict[str, Any]) -> str:
    """Return the share of symbols that `copy_task.py` copies, by what networks were trained and evaluated with."""
    rows = found["rows"]
    lines = [
        [row["trained"], *(spread(shares, ".1%") for shares in row["copied"].values()), f"{row['train_seconds']:.0f}"]
        for row in rows
    ]
    header = ["trained with, evaluated with", *rows[0]["copied"], "training (s)"]
    return f"""{markdown_table(header, lines)}

Texts of {found["tokens"]:,} symbols, {rows[0]["num_steps"]:,} steps, {rows[0]["parameters"]:,} parameters, \
{len(found["seeds"])} seed(s); a guess is right for {found["guessed"]:.1%}. {_conditions(found)}"""


def routing_losses(found: dict[str, Any]) -> str:
    """Return how well the networks of `compare_routing.py` predict held-out text, and how long they trained."""
    lines = [
        [
            kind,
            f"{of['bits_per_token']:.3f}",
            f"{of['bits_per_late_token']:.3f}",
            f"{of['bits_per_byte']:.3f}",
            f"{of['bits_per_byte_at_equal_time']:.3f}",
            f"{of['train_seconds']:.0f}",
        ]
        for kind, of in found["kinds"].items()
    ]
    header = ["heads", "bits per token", "second half of a text", "bits per byte", "at equal time", "training (s)"]
    any_kind = next(iter(found["kinds"].values()))
    return f"""{markdown_table(header, lines)}

Held-out documentation of Python, {found["data"]["held_out_blocks"]:,} texts of {found["data"]["block_size"]:,} \
tokens; {any_kind["num_steps"]:,} steps of one such text; a token reads at most {any_kind["scores_per_token"]:,} in \
every head; one seed. {_conditions(found)}"""


def block_losses(found: dict[str, Any]) -> str:
    """Return the losses of `compare_block_top_k.py`, by what a model was trained further with and reads."""
    names = {"none": "no", "all": "all keys", "blocks": "chosen blocks"}
    lines = [
        [names[row["trained"]], names[row["read"]], *(f"{row[name]:.3f}" for name in ("loss", "late_loss"))]
        + [f"{row['gap']:+.3f}"]
        for row in found["rows"]
    ]
    header = ["further training with", "reads", "nats per token", "last quarter of a text", "above all keys"]
    settings = found["settings"]
    return f"""{markdown_table(header, lines)}

A query reads {settings["pattern"]}; {settings["held_out_texts"]} held-out texts of {settings["text_tokens"]:,} \
tokens; further training of {settings["max_steps"]:,} steps of one such text, with blocks in all but the last \
{settings["full_attention_share"]:.0%}; "above all keys": than the model trained as long that reads all; one seed. \
{_conditions(found)}"""


def indexer_recall(found: dict[str, Any]) -> str:
    """Return what the keys that indexers choose hold of the attention in `compare_indexer.py`, and the losses."""
    lines = [[row["read"], f"{row['recall']:.3f}", f"{row['loss']:.3f}"] for row in found["rows"]]
    settings = found["settings"]
    took = ", ".join(
        f"{name}: {of['num_steps']:,} in {of['train_seconds']:.0f} s" for name, of in found["steps"].items()
    )
    return f"""{markdown_table(["keys read", "share of the attention", "nats per token"], lines)}

A query reads {settings["top_k"]} keys; {settings["held_out_texts"]} held-out texts of {settings["text_tokens"]:,} \
tokens; steps of one such text: {took}; one seed. {_conditions(found)}"""


def _conditions(found: dict[str, Any]) -> str:
    text = f"`{found['command']}`; {machine_line(found['machine'])}. {found.get('note', '')}"
    return f"*{text.strip()}*"
