"""What a finished run leaves to read: a table, a model card for each block, and the closing words."""

import json
from pathlib import Path
from typing import Any

COLUMNS = {
    "block": ("block", "{}"),
    "parameters": ("parameters", "{:,}"),
    "learning_rate": ("learning rate", "{:g}"),
    "eval_loss": ("held-out nats/token", "{:.4f}"),
    "bits_per_byte": ("bits per byte", "{:.4f}"),
    "best_step": ("best step", "{:,}"),
    "train_seconds": ("training (s)", "{:.1f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "max_logit_difference": ("reload difference", "{:.1e}"),
}

LOCAL_MODEL = "path/to/this/folder"  # the name of the repository takes its place when the model is pushed
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- hf_efficient_attn
- simplified_transformer
- {block}
- generated_from_trainer
---

# simplified_transformer, block `{block}`

A causal language model of {parameters:,} parameters, trained by `examples/train_clm.py` of `hf_efficient_attn` on
{source}. Block from He & Hofmann, "Simplifying Transformer Blocks" (arXiv:2311.01906).

```python
import hf_efficient_attn  # registers the model family
from transformers import pipeline

generate = pipeline("text-generation", model="{model_name}")
print(generate({prompt!r}, max_new_tokens=64)[0]["generated_text"])
```

## Training

    {command}

{num_steps:,} steps of {tokens_per_step:,} tokens, {optimizer}. Shape: {shape}.

## Results

{table}

{others}Bits per byte = loss · predicted tokens / (ln 2 · bytes), over {held_out_tokens:,} tokens of held-out text.
Training seconds and tokens/s count training steps only, on {device}.

## Limits

A demonstration of the block at a small size. It continues text of the kind it was trained on and knows nothing else.
"""


def results_table(results: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table, one row a block."""
    names = [title for title, _ in COLUMNS.values()]
    rows = [[_cell(result.get(key), form) for key, (_, form) in COLUMNS.items()] for result in results]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = [names, ["-" * width for width in widths], *rows]
    return "\n".join(_line(line, widths) for line in lines)


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)


def _line(cells: list[str], widths: list[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def model_card(result: dict[str, Any], corpus: dict[str, Any]) -> str:
    """Return the README.md of one block's folder.

    Args:
        result: of the chosen learning rate, with `tried` for the others.
        corpus: `source` and the sizes of `TokenBlocks.describe()`.
    """
    tried = result.get("tried", [])
    others = "Learning rates tried:\n\n" + results_table(tried) + "\n\n" if len(tried) > 1 else ""
    return CARD.format(**{**corpus, **result}, model_name=LOCAL_MODEL, table=results_table([result]), others=others)


def write_results(folder: Path, corpus: dict[str, Any], command: str, results: list[dict[str, Any]]) -> None:
    """Write results.json and results.md into `folder`."""
    blocks = {result["block"]: result for result in results}
    content = {"command": command, "corpus": corpus, "blocks": blocks}
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n")
    text = f"# Causal language models on {corpus['source']}\n\n    {command}\n\n{results_table(results)}\n"
    stops = [f"`{result['block']}` stopped early. {result['stopped']}" for result in results if result["stopped"]]
    (folder / "results.md").write_text("\n\n".join([text, *stops]))


def closing_summary(folder: Path, results: list[dict[str, Any]]) -> str:
    """Return what to print last: samples, the table, and where everything is."""
    parts = []
    for result in results:
        sample = result["sample"].rstrip().replace("\n", "\n    ")
        prompt = result["prompt"].replace("\n", "\n    ")
        parts.append(
            f"{result['block']}, loaded in a fresh process, continues\n\n    {prompt}\n\nwith\n\n    {sample}\n"
        )
        if result["stopped"]:
            parts.append(f"{result['block']} stopped early. {result['stopped']}\n")
    parts.append(results_table(results) + "\n")
    parts.append(f"Models     {', '.join(str(folder / result['block']) for result in results)}")
    parts.append(f"Results    {folder / 'results.json'}, {folder / 'results.md'}")
    parts.append(f"Picture    {folder / 'loss_curves.png'}")
    return "\n".join(parts)
