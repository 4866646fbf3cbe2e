"""The folder of a run: opened once, resumed with the same settings, and what is written into it."""

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArgumentParser
from transformers.utils import logging

import hf_efficient_attn as hea
from hf_efficient_attn.bench.report import describe_machine, machine_line, markdown_table

CARD = """---
library_name: transformers
tags:
- hf_efficient_attn
- {model_type}
---

# {title}

{text}

```python
import hf_efficient_attn  # registers the model family
from transformers import pipeline

model = pipeline("{task}", model="path/to/this/folder")
```

A demonstration at a small size, trained briefly. Measure it before use.
"""


def run_experiment(main: Callable[[Any], None], arguments: type, **defaults: Any) -> None:
    """Run a script with arguments from the command line; an error of the package exits with a message of one line.

    Args:
        arguments: a dataclass.
        defaults: defaults that replace those of its fields.
    """
    parser = HfArgumentParser(arguments)
    parser.set_defaults(**defaults)
    (args,) = parser.parse_args_into_dataclasses()
    # progress bars of saving and loading; training keeps its own
    logging.disable_progress_bar()
    try:
        main(args)
    except (hea.EfficientAttentionError, StrictDataclassError, FileNotFoundError) as error:
        raise SystemExit(" ".join(str(error).split())) from error


def open_run(args: Any, resume: bool = False) -> Path:
    """Return the folder `args.output_dir` of a new run, or of the run with these arguments that is resumed."""
    folder, settings = Path(args.output_dir), {**asdict(args), "resume": None, "output_dir": None}
    file = folder / "settings.json"
    if file.exists():
        earlier = json.loads(file.read_text())
        if not resume:
            raise SystemExit(
                f"{folder} already holds a run. Name another --output_dir, or continue it with --resume, if the "
                "script has that option."
            )
        changed = [f"--{name} (was {earlier.get(name)})" for name in settings if settings[name] != earlier.get(name)]
        if changed:
            raise SystemExit(f"{folder} was started with other settings: {', '.join(changed)}.")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=2) + "\n")
    return folder


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, task: str, title: str, text: str
) -> None:
    """Save a model with its tokenizer and a card that says what it is."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    card = CARD.format(model_type=model.config.model_type, task=task, title=title, text=text)
    (folder / "README.md").write_text(card)


@torch.no_grad()
def reload_difference(
    model: PreTrainedModel, folder: Path, input_ids: torch.Tensor, auto_class: Any = AutoModelForCausalLM
) -> float:
    """Return the largest difference between the logits of a model and of its copy that is loaded from a folder."""
    loaded = auto_class.from_pretrained(folder).eval()
    found = loaded(input_ids=input_ids)[0]
    return (model.eval()(input_ids=input_ids.to(model.device))[0].cpu() - found).abs().max().item()


def results_table(columns: Mapping[str, tuple[str, str]], results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as a Markdown table, one row each; "–" stands for a value that a row does not have.

    Args:
        columns: key of the result → its title and format.

    >>> print(results_table({"model": ("model", "{}"), "seconds": ("time (s)", "{:.1f}")}, [{"model": "sparse"}]))
    | model  | time (s) |
    |:-------|---------:|
    | sparse |        – |
    """
    rows = [
        ["–" if result.get(key) is None else form.format(result[key]) for key, (_, form) in columns.items()]
        for result in results
    ]
    return markdown_table([title for title, _ in columns.values()], rows)


def write_results(folder: Path, title: str, content: Mapping[str, Any], text: str) -> str:
    """Write results.json (`content`, the command and the machine) and results.md; return what to print last."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    if "--output_dir" in words:
        del words[(place := words.index("--output_dir")) : place + 2]
    command = shlex.join(["python", f"examples/experiments/{Path(sys.argv[0]).name}", *words])
    machine = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    everything = {"command": command, "machine": machine, **content}
    (folder / "results.json").write_text(json.dumps(everything, indent=2, ensure_ascii=False) + "\n")
    text = f"{text}\n\nOn {machine_line(machine)}."
    (folder / "results.md").write_text(f"# {title}\n\n    {command}\n\n{text}\n")
    return f"\n{text}\n"


def say_where(folder: Path, models: Iterable[str], picture: str | None = None) -> None:
    """Print where the saved models, the picture and the figures are; `models` and `picture` are names in the folder."""
    names = [str(folder / name) for name in models]
    saved = f"Model{'s' * (len(names) > 1)}: {' '.join(names)}. " if names else ""
    drawn = "" if picture is None else f"Picture: {folder / picture}. "
    print(f"{saved}{drawn}Figures: {folder / 'results.json'}")


def save_picture(figure: Any, file: Path) -> None:
    """Write a figure of `hf_efficient_attn.pictures.new_figure`."""
    for panel in figure.axes:
        panel.grid(alpha=0.3)
    figure.savefig(file, dpi=130)
