"""Teach a Llama's indexers where it looks, and see what it loses by reading only the keys that they choose.

    pip install ".[train]"
    python examples/experiments/compare_indexer.py

gives SmolLM2 of 135 million weights lightning indexers (`hea.index`), which learn from its attention on pages of
Python's documentation (the warm-up of DeepSeek's paper, arXiv:2512.02556; the model itself does not change). Before and
after, it measures on other pages which share of the attention the chosen keys have, and the loss of the model that
reads only these, against that of the model that reads everything. A model and a text of yours:

    python examples/experiments/compare_indexer.py --model_name_or_path my_llama --text_file book.txt --top_k 128
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.hf_argparser import HfArg, HfArgumentParser

import hf_efficient_attn as hea
from hf_efficient_attn.bench.harness.report import describe_machine, markdown_table


@dataclass
class Arguments:
    """What is compared."""

    model_name_or_path: str | None = HfArg(default=None, help="Decoder with RoPE. Default: SmolLM2-135M.")
    text_file: str | None = HfArg(default=None, help="Text to read. Default: documentation of Python.")
    top_k: int = HfArg(default=64, help="Keys that a query reads.")
    num_heads: int = HfArg(default=8, help="Heads of an indexer.")
    text_tokens: int = HfArg(default=512, help="Tokens of a text.")
    max_eval_samples: int = HfArg(default=4, help="Measure on so many texts, which are not trained on.")
    max_steps: int = HfArg(default=60, help="Steps of the warm-up, of one text each.")
    learning_rate: float = HfArg(default=1e-3, help="Of the warm-up, as in the paper; constant.")
    seed: int = HfArg(default=42, help="Of the indexers and the order of the texts.")
    output_dir: str = HfArg(default="outputs/compare_indexer", help="Folder of the results and the model.")


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    if args.model_name_or_path is None:
        from example_data import pretrained_llama
    source = args.model_name_or_path or pretrained_llama()
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source)
    texts = load_texts(args, tokenizer)
    set_seed(args.seed)
    hea.index(model, top_k=args.top_k, num_heads=args.num_heads)
    evaluation, rest = texts[: args.max_eval_samples], texts[args.max_eval_samples :]
    training = TrainingArguments(
        args.output_dir,
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=1,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
    )
    trainer = Trainer(model, training, train_dataset=Dataset.from_dict({"input_ids": rest, "labels": rest}))
    rows = {"all keys": {"recall": 1.0, "loss": loss_of(model, evaluation)}}
    rows["chosen, before the warm-up"] = measured(model, evaluation)
    trainer.train()
    rows["chosen, after the warm-up"] = measured(model, evaluation)
    results = {
        "command": " ".join(["python examples/experiments/compare_indexer.py", *sys.argv[1:]]),
        "machine": describe_machine(model.device),
        "settings": {**asdict(args), "train_texts": len(rest)},
        "rows": rows,
        "log": trainer.state.log_history,
    }
    trainer.save_model()
    tokenizer.save_pretrained(args.output_dir)
    (Path(args.output_dir) / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    table = [[name, f"{row['recall']:.3f}", f"{row['loss']:.3f}"] for name, row in rows.items()]
    print(markdown_table(["keys read", "share of the attention", "nats per token"], table))


def load_texts(args: Arguments, tokenizer: Any) -> list[list[int]]:
    """Return parts of the pages, or of the text, of `text_tokens` tokens, in random order."""
    if args.text_file:
        documents = [Path(args.text_file).read_text(encoding="utf-8")]
    else:
        from example_data import python_documentation

        documents = list(python_documentation()["validation"]["text"])
    size, ids = args.text_tokens, tokenizer(documents)["input_ids"]
    texts = [page[end - size : end] for page in ids for end in range(size, len(page) + 1, size)]
    if len(texts) <= args.max_eval_samples:
        raise SystemExit(f"There are {len(texts)} texts of {size:,} tokens; more than --max_eval_samples are needed.")
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(args.seed))
    return [texts[index] for index in order.tolist()]


def measured(model: Any, texts: list[list[int]]) -> dict[str, float]:
    """Return the share of the attention that the chosen keys have, of later queries, and the loss of reading these."""
    ids, top_k = torch.tensor(texts, device=model.device), model.config.attention_indexer["top_k"]
    # the first queries have no more keys than they may read
    recalls = [hea.index_recall(model, input_ids=text[None])[..., top_k:].mean() for text in ids]
    hea.index_stage(model, "sparse")
    loss = loss_of(model, texts)
    hea.index_stage(model, "warmup")
    return {"recall": torch.stack(recalls).mean().item(), "loss": loss}


@torch.no_grad()
def loss_of(model: Any, texts: list[list[int]]) -> float:
    """Return the mean loss of all tokens of texts."""
    model.eval()
    batches = torch.tensor(texts, device=model.device)[:, None]
    return torch.stack([model(input_ids=text, labels=text).loss for text in batches]).mean().item()


if __name__ == "__main__":
    main()
