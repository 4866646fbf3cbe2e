"""Tables of ETC's card, for `figures.py`."""

from typing import Any

from hf_efficient_attn.bench.harness.report import machine_line, markdown_table


def named_sections(found: dict[str, Any]) -> str:
    """Return what the models of `compare_structure.py` name, and how long they trained."""
    lines = [
        [
            of["name"],
            f"{of['parameters']:,}",
            f"{of['named']:.1%}",
            f"{of['named_of_a_title']:.1%}",
            f"{of['pretraining_seconds']:.0f} + {of['train_seconds']:.0f}",
        ]
        for of in found["kinds"].values()
    ]
    words = found["words"]
    lines.append(["words of a section (TF-IDF)", "–", f"{words['named']:.1%}", f"{words['named_of_a_title']:.1%}", "–"])
    header = ["model", "parameters", "sections named", "mean over titles", "training (s)"]
    data, note = found["data"], found.get("note", "")
    return f"""{markdown_table(header, lines)}

{data["held_out_sections"]:,} sections of {data["held_out_pages"]:,} held-out pages, {len(data["titles"])} titles; \
models are asked for the {data["asked_sections"]:,} that begin before texts are cut; \
{found["pretraining_steps"]:,} steps of pre-training and {found["max_steps"]:,} of training, {found["batch_size"]} \
pages each; one seed. `{found["command"]}`. *{machine_line(found["machine"])}. {note}*"""
