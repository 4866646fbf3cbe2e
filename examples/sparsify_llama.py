"""Give a Llama a band and its first tokens, and see what that saves in time and costs in quality.

    pip install "hf-efficient-attn[train]"
    python examples/sparsify_llama.py

trains a small dense Llama on Python source, up to 1,024 tokens at a time, in six minutes on two cores. Its weights then
read held-out files of 8,192 tokens: densely, by a band, by a band and the first tokens ("sinks"), and by these with
positions counted in the cache (StreamingLLM). Perplexity by position, and the time to read a prompt into a cache, with
logits of the last token alone, against causal SDPA, are left in `outputs/sparsify_llama`. A model and a text of yours:

    python examples/sparsify_llama.py --model_name_or_path my_llama --text_file book.txt --dense_layers 0 2 4 6
"""

import copy
import json
import math
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Trainer, TrainingArguments, set_seed
from transformers.hf_argparser import HfArg, HfArgumentParser

import hf_efficient_attn as hea
from hf_efficient_attn.bench.harness.report import describe_machine, markdown_table, resolve_device
from hf_efficient_attn.bench.harness.timing import Case, time_interleaved
from hf_efficient_attn.patterns import Band, GlobalTokens

LLAMA = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}
DENSE, BAND, SINKS, STREAMED = "dense", "band", "band + first tokens", "the same, positions in the cache"
TRAINED_TOKENS, CHUNK_TOKENS, REPEATS, MOST_TEXTS = 1024, 256, 5, 8


@dataclass
class Arguments:
    """What is compared."""

    model_name_or_path: str | None = HfArg(default=None, help="Decoder with RoPE. Default: a small Llama is trained.")
    text_file: str | None = HfArg(default=None, help="Text that it has not seen. Default: held-out Python files.")
    left: int = HfArg(default=252, help="Tokens before it that a token reads.")
    num_first: int = HfArg(default=4, help="First tokens that all others read, too.")
    dense_layers: list[int] = HfArg(default_factory=list, help="Layers that keep their dense attention.")
    text_tokens: int = HfArg(default=8192, help="Tokens of a text; prompts are timed up to twice that.")
    max_steps: int = HfArg(default=1200, help="Training steps of the small Llama, of 1,024 tokens.")
    output_dir: str = HfArg(default="outputs/sparsify_llama", help="Folder of the results and the model.")


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    set_seed(0)
    model, tokenizer = load_model(args)
    model = model.to(resolve_device("auto")).eval()
    texts = load_texts(args, tokenizer).to(model.device)
    models = {DENSE: hea.sparsify(model, None), BAND: copy.deepcopy(model), SINKS: copy.deepcopy(model)}
    band, first = Band(args.left, 0), GlobalTokens(list(range(args.num_first)))
    for way, pattern in {BAND: band, SINKS: band | first}.items():
        layers = range(model.config.num_hidden_layers)
        hea.sparsify(models[way], [None if layer in args.dense_layers else pattern for layer in layers])
    results = {
        "command": " ".join(["python examples/sparsify_llama.py", *sys.argv[1:]]),
        "machine": describe_machine(model.device),
        "settings": {**asdict(args), "texts": len(texts)},
        "model": {"parameters": model.num_parameters(), "positions": model.config.max_position_embeddings},
        "perplexity": {way: perplexities(each, texts) for way, each in models.items()}
        | {STREAMED: perplexities(models[SINKS], texts, is_streamed=True)},
        "prompt_seconds": prompt_seconds(models, 2 * args.text_tokens),
    }
    models[SINKS].save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    (Path(args.output_dir) / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    for name, of_samples in {"perplexity": float, "prompt_seconds": median}.items():
        rows = [[way, *(f"{of_samples(each):.3g}" for each in found.values())] for way, found in results[name].items()]
        print("", markdown_table([name, *(f"up to {tokens:,}" for tokens in results[name][DENSE])], rows), sep="\n")


def load_model(args: Arguments) -> tuple[Any, Any]:
    """Return the checkpoint, or a small Llama, trained here on short rows first, and the tokenizer."""
    if args.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
        return model, AutoTokenizer.from_pretrained(args.model_name_or_path)
    from example_data import new_tokenizer, python_sources

    files = list(python_sources()["train"]["text"])
    tokenizer = new_tokenizer(files, vocab_size=4096)
    ids = [token for row in tokenizer(files)["input_ids"] for token in row]
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": TRAINED_TOKENS, "tie_word_embeddings": True}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA, **sizes, pad_token_id=tokenizer.pad_token_id))
    for size, share in ((128, 2 / 3), (TRAINED_TOKENS, 1 / 3)):
        rows = [ids[start : start + size] for start in range(0, len(ids) - size, size)]
        training = TrainingArguments(
            max_steps=math.ceil(share * args.max_steps), per_device_train_batch_size=TRAINED_TOKENS // size,
            learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=20, save_strategy="no", report_to="none",
        )  # fmt: skip
        Trainer(model, training, train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows})).train()
    return model, tokenizer


def load_texts(args: Arguments, tokenizer: Any) -> torch.Tensor:
    """Return parts of held-out files, or of the text, [texts, tokens]."""
    if args.text_file:
        documents = [Path(args.text_file).read_text(encoding="utf-8")]
    else:
        from example_data import python_sources

        documents = list(python_sources()["validation"]["text"])
    size, ids = args.text_tokens, tokenizer(documents)["input_ids"]
    rows = [document[end - size : end] for document in ids for end in range(size, len(document) + 1, size)]
    if not rows:
        raise SystemExit(f"No text has {size:,} tokens: give a longer one, or fewer --text_tokens.")
    return torch.tensor(rows[:MOST_TEXTS])


@torch.no_grad()
def losses(model: Any, text: torch.Tensor, is_streamed: bool) -> torch.Tensor:
    """Return the loss of every token of a text but the first, read at once, or in chunks through a small cache."""
    cache = hea.PatternCache(model, positions="cache") if is_streamed else None
    found, size = [], CHUNK_TOKENS if is_streamed else len(text)
    for ids, after in zip(text[:-1].split(size), text[1:].split(size), strict=True):
        logits = model(ids[None], past_key_values=cache, use_cache=is_streamed).logits[0]
        found.append(torch.nn.functional.cross_entropy(logits.float(), after, reduction="none"))
    return torch.cat(found)


def perplexities(model: Any, texts: torch.Tensor, is_streamed: bool = False) -> dict[int, float]:
    """Return the perplexity of the tokens at positions up to 512, from there to 1,024, and so on by doubling."""
    found, num_tokens = torch.stack([losses(model, text, is_streamed) for text in texts]), texts.shape[1]
    ends = [0, *(2**power for power in range(9, 31) if 2**power < num_tokens), num_tokens]
    return {end: math.exp(found[:, start:end].mean()) for start, end in pairwise(ends)}


@torch.no_grad()
def prompt_seconds(models: dict[str, Any], longest: int) -> dict[str, dict[int, tuple[float, ...]]]:
    """Return by model and length the seconds of every reading of a prompt but the first; the models take turns."""
    found: dict[str, Any] = {way: {} for way in models}
    for tokens in (2**power for power in range(9, 31) if 2**power <= longest):
        ids = torch.randint(models[DENSE].config.vocab_size, (1, tokens), device=models[DENSE].device)
        read = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1}
        cases = {way: Case(lambda _, model=model, read=read: model(**read)) for way, model in models.items()}
        for way, timing in time_interleaved(cases, REPEATS, ids.device, description=f"{tokens:,} tokens").items():
            found[way][tokens] = timing.seconds
    return found


if __name__ == "__main__":
    main()
