"""Write the figures of the README and the cards from committed results: `python model_cards/figures.py`.

A generated part of a page stands between `<!-- figures: NAME, HEADING -->` and `<!-- end of figures -->`. NAME is a
benchmark, with results in `bench_NAME/NAME.json`, an example, with results in `examples/NAME.json`, "neighbours" or
"versions", which the scripts of these names in tests/ write. HEADING is that of a table which `hf-efficient-attn bench
NAME` prints, or one of `OWN`, a function of this file. The benchmark's own page is made again, too, and so is every
picture of `pictures_of_cards.py` that shows something else than its data. What has no results yet says so. With
`--check` nothing is written, and a page or a picture that differs is an error: each picture is made anew in memory, and
the digest of its texts, lines, bars and images is compared with the one that its PNG was saved with.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures_of_choices
import figures_of_gpus
import figures_of_lists
import figures_of_neighbours
import figures_of_spans
import figures_of_stars
import figures_of_structure
import figures_of_texts
import figures_of_training
import figures_of_trees
import picture_digest
import pictures_of_cards
from committed import CARDS, files, results

from hf_efficient_attn.bench.attention import report as attention_report
from hf_efficient_attn.bench.attention.figure import NAMES
from hf_efficient_attn.bench.attention.summary import by_contestant
from hf_efficient_attn.bench.blocks import report as blocks_report
from hf_efficient_attn.bench.blocks.counts import counts_table, paper_counts
from hf_efficient_attn.bench.calibrate import report as calibrate_report
from hf_efficient_attn.bench.content import report as content_report
from hf_efficient_attn.bench.encoders import report as encoders_report
from hf_efficient_attn.bench.harness.report import machine_line, markdown_table
from hf_efficient_attn.bench.mechanisms import report as mechanisms_report
from hf_efficient_attn.bench.models import report as models_report
from hf_efficient_attn.bench.sequence import report as sequence_report
from hf_efficient_attn.bench.spans import report as spans_report

BLOCK = re.compile(r"(<!-- figures: (\w+), ([^\n]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
REPORTS: dict[str, Any] = {
    "attention": attention_report,
    "attention_amd": attention_report,
    "blocks": blocks_report,
    "calibrate": calibrate_report,
    "calibrate_intel": calibrate_report,
    "content": content_report,
    "etc": encoders_report,
    "grids": attention_report,
    "images": encoders_report,
    "mechanisms": mechanisms_report,
    "mechanisms_causal": mechanisms_report,
    "models": models_report,
    "models_amd": models_report,
    "sequence": sequence_report,
    "spans": spans_report,
    "spans_amd": spans_report,
    "star": encoders_report,
    "trees": encoders_report,
}
NONE = "–"
OTHERS = "another library"
# whose figures the README shows, and at which lengths in tokens
SHOWN = {
    NAMES["auto"]: (512, 2048, 8192, 32768, 131072),
    NAMES["flex"]: (2048, 8192, 131072),
    OTHERS: (2048,),
}
CONTESTANTS = {
    **{name: NAMES[name] for name in ("auto", "flex")},
    **dict.fromkeys(("local_attention", "longformer_layer", "bigbird_layer"), OTHERS),
}


def main() -> int:
    """Write all pages and pictures; with `--check` return 1 if one of them differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page or picture differs")
    only_check = parser.parse_args().check
    are_stale = [renew_pages(only_check), renew_pictures(only_check)]
    return int(only_check and any(are_stale))


def renew_pages(only_check: bool) -> bool:
    """Write the pages that differ from their results, or only name them; return whether there are any."""
    stale = {
        page: text for page, text in pages().items() if not page.exists() or page.read_text(encoding="utf-8") != text
    }
    for page, text in stale.items():
        if not only_check:
            page.write_text(text, encoding="utf-8")
        print(f"{page} {'differs from its results' if only_check else 'written'}")
    return bool(stale)


def renew_pictures(only_check: bool) -> bool:
    """Write the pictures that differ from their data, or only name them, and those that nothing draws."""
    folder = CARDS / "pictures"
    drawn = {folder / f"{name}.png": draw for name, draw in pictures_of_cards.PICTURES.items()}
    unknown = [file for file in sorted(folder.rglob("*.png")) if file not in drawn]
    for file in unknown:
        print(f"{file} is drawn by nothing: give it a line in pictures_of_cards.py, or delete it")
    num_stale = 0
    for file, draw in drawn.items():
        figure = draw()
        if not file.exists() or picture_digest.saved_digest(file) != picture_digest.digest(figure):
            num_stale += 1
            if not only_check:
                picture_digest.save(figure, file, pictures_of_cards.pixels_per_inch(file))
            print(f"{file} {'differs from its data' if only_check else 'written'}")
    return bool(unknown or num_stale)


def pages() -> dict[Path, str]:
    """Return what every page should say."""
    found = {CARDS / f"bench_{name}" / f"{name}.md": REPORTS[name].results_markdown(results(name)) + "\n"
             for name in measured()}  # fmt: skip
    for page in [CARDS.parent / "README.md", *sorted(CARDS.glob("*.md"))]:
        found[page] = BLOCK.sub(_with_figures, page.read_text(encoding="utf-8"))
    return found


def measured() -> list[str]:
    """Return the benchmarks with committed results."""
    return [name for name in REPORTS if (CARDS / f"bench_{name}").exists()]


def _with_figures(block: re.Match[str]) -> str:
    begin, name, heading, end = block.groups()
    if not files(name):
        return f"{begin}Not measured yet.\n{end}"
    found = results(name)
    text = OWN[heading](found) if heading in OWN else REPORTS[name].sections(found)[heading]
    # unpadded, since pages are not read unrendered
    return begin + re.sub(r"(?<=\|) +| +(?=\|)", " ", re.sub(r"-{3,}(?=:)|(?<=:)-{3,}", "--", text)) + f"\n{end}"


def machine(found: dict[str, Any]) -> str:
    """Return where and when a benchmark was run."""
    return f"*{machine_line(found['machine'])}*"


def against_dense(found: dict[str, Any]) -> str:
    """Return how many times as fast as dense attention each contestant is, on both processors."""
    settings, elsewhere, lines = found["settings"], results("attention_amd"), {}
    for make, measured_there in (("Intel", found), ("AMD", elsewhere)):
        for pattern, contestant, rows in by_contestant(measured_there["results"]):
            if contestant in CONTESTANTS:
                cells = {(CONTESTANTS[contestant], row["tokens"]): _speeds(row) for row in rows}
                lines.setdefault(pattern, {}).setdefault(make, {}).update(cells)
    columns = [(name, tokens) for name, lengths in SHOWN.items() for tokens in lengths]
    header = [f"{name} at {tokens:,}" if tokens == SHOWN[name][0] else f"{tokens:,}" for name, tokens in columns]
    cells = [
        [f"{pattern}, {make}", *(of.get(column, NONE) for column in columns)]
        for pattern, makes in lines.items()
        for make, of in makes.items()
    ]
    return f"""{markdown_table(["pattern, processor", *header], cells)}

Times as fast as torch's SDPA without a mask (beyond {settings["dense_limit"]:,} tokens extrapolated), by tokens: \
forward and backward / forward alone; {settings["heads"]} heads of {settings["head_dim"]}, {settings["dtype"]}; \
{machine_line(found["machine"])}; AMD EPYC, {elsewhere["machine"]["date"][:10]}. The other library is \
local-attention for the band, and transformers' own layer for longformer and bigbird."""


def _speeds(row: dict[str, Any]) -> str:
    speeds = [row[measure].get("speed_against_dense", {}).get("median") for measure in ("forward_backward", "forward")]
    texts = [NONE if speed is None else f"{speed:.1f}" if speed < 9.95 else f"{speed:.0f}" for speed in speeds]
    return NONE if set(texts) == {NONE} else " / ".join(texts)


def spam(found: dict[str, Any]) -> str:
    """Return the accuracy of `compare_document_lengths.py` by model and by how much of a document it reads."""
    lines = [
        [f"{kind}, {reading}", _spread(score, "accuracy"), _spread(score, "accuracy_long")]
        for kind, model in found["models"].items()
        for reading, score in model["scores"].items()
    ]
    lines += [
        [f"bag of words, {reading}", f"{score['accuracy']:.3f}", f"{score['accuracy_long']:.3f}"]
        for reading, score in found["bag_of_words"].items()
    ]
    data = found["data"]
    num_all, num_long = data["test_documents"], data["long_test_documents"]
    header = [
        "model, tokens it reads",
        f"accuracy on all {num_all:,}",
        f"on {num_long:,} longer than {data['long_from']:,}",
    ]
    return f"{markdown_table(header, lines)}\n\n{machine(found)}"


def _spread(score: dict[str, float], name: str) -> str:
    return f"{score[name]:.3f} ± {score[f'{name}_deviation']:.3f}"


def blocks_setting(found: dict[str, Any]) -> str:
    """Return the shape of the blocks that were compared, and what the columns of their tables mean."""
    settings = found["settings"]
    shape = (
        f"Width {settings['hidden_size']:,}, {settings['num_layers']} layers, {settings['num_heads']} heads, "
        f"MLP {settings['intermediate_size']:,}"
    )
    return f"{shape}; {machine_line(found['machine'])}. {blocks_report.legend(settings)}"


def sequence_setting(found: dict[str, Any]) -> str:
    """Return the layer whose text was shared, and what the columns of its tables mean."""
    return f"{sequence_report.legend(found['settings'])} *{machine_line(found['machine'])}*"


def kills(found: dict[str, Any]) -> str:
    """Return how many kills came in time, and how many jobs lost something."""
    early = sum(found["before_the_end"].values())
    said = f"Of {found['kills']:,} kills {early:,} came before the end, and {found['lost'] or 'nothing'} was lost."
    # what was recorded first has neither
    return f"{said} *Seed {found['seed']}; {machine_line(found['machine'])}*" if "machine" in found else said


OWN: dict[str, Callable[[dict[str, Any]], str]] = {
    "machine": machine,
    "against dense": against_dense,
    "spam": spam,
    "span kinds": figures_of_spans.kinds,
    "span heads": figures_of_spans.heads,
    "spans along a text": figures_of_spans.along_text,
    "setting": blocks_setting,
    "sequence setting": sequence_setting,
    "counts": lambda _: counts_table(paper_counts()),
    "learning": figures_of_training.learning,
    "made long": figures_of_training.made_long,
    "answers": figures_of_training.answers,
    "faster llama": figures_of_training.faster_llama,
    "llama, perplexity": figures_of_training.llama_perplexity,
    "llama, prefill": figures_of_training.llama_prefill,
    "summaries": figures_of_texts.summaries,
    "translations": figures_of_texts.translations,
    "masked summation": figures_of_stars.masked_summation,
    "trees": figures_of_trees.classified,
    "trees at equal steps": figures_of_trees.compared,
    "kernels on a GPU": figures_of_gpus.kernels,
    "list operations": figures_of_lists.list_operations,
    "copied symbols": figures_of_choices.copied_symbols,
    "routing losses": figures_of_choices.routing_losses,
    "block losses": figures_of_choices.block_losses,
    "indexer recall": figures_of_choices.indexer_recall,
    "named sections": figures_of_structure.named_sections,
    "kills": kills,
    "neighbours": figures_of_neighbours.neighbours_table,
    "versions": figures_of_neighbours.versions_table,
}
if __name__ == "__main__":
    sys.exit(main())
