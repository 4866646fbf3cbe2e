"""Measure what a sparse attention pattern saves and costs in a pretrained Llama: time to read a prompt, and perplexity.

    pip install ".[train]"  # if you copy this file, copy example_data, too: it has the default data and model
    python examples/sparsify_llama.py

The command reads pages of Python's documentation, 8,192 tokens each, with SmolLM2 (135 million parameters, 93 MB,
downloaded once). It compares full attention; a band; a band and the first tokens ("attention sinks"), in all layers or
in every second layer; and the latter pattern in all layers with positions counted in the cache (StreamingLLM). After
ten to twenty minutes on two cores it prints the perplexity by position and the time to read a prompt into a cache, and
writes both to `outputs/sparsify_llama` with the sparse model. `run_lora.py` recovers quality. With your model and text:

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
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.hf_argparser import HfArg, HfArgumentParser

import hf_efficient_attn as hea
from hf_efficient_attn.bench.report import describe_machine, markdown_table, resolve_device
from hf_efficient_attn.bench.timing import Case, time_interleaved
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.patterns import Band, GlobalTokens

DENSE, SINKS = "dense", "band + first tokens"


@dataclass
class Arguments:
    model_name_or_path: str | None = HfArg(default=None, help="Decoder with RoPE. Default: SmolLM2-135M.")
    text_file: str | None = HfArg(default=None, help="Your text. Default: documentation of Python.")
    left: int = HfArg(default=1020, help="Attend to this number of tokens before each token.")
    num_first: int = HfArg(default=4, help="Also attend to this number of first tokens.")
    dense_layers: list[int] = HfArg(default_factory=list, help="Numbers of layers that keep full attention.")
    text_tokens: int = HfArg(default=8192, help="Tokens of each text, and of the longest prompt.")
    max_eval_samples: int = HfArg(default=3, help="Evaluate on at most this number of texts.")
    output_dir: str = HfArg(default="outputs/sparsify_llama", help="Folder of the results and the sparse model.")


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    if args.model_name_or_path is None:
        from example_data import pretrained_llama
    source = args.model_name_or_path or pretrained_llama()
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source).to(resolve_device("auto")).eval()
    if args.text_file:
        documents = [Path(args.text_file).read_text(encoding="utf-8")]
    else:
        from example_data import python_documentation

        documents = list(python_documentation()["validation"]["text"])
    size, ids = args.text_tokens, tokenizer(documents, verbose=False)["input_ids"]
    parts = [document[end - size : end] for document in ids for end in range(size, len(document) + 1, size)]
    texts = torch.tensor(parts[: args.max_eval_samples], device=model.device)
    band, both = Band(args.left, 0), Band(args.left, 0) | GlobalTokens(list(range(args.num_first)))
    patterns = {"band": (band, band), SINKS: (both, both), "the same, every second layer": (None, both)}
    models = {DENSE: hea.sparsify(model, None)}
    for way, (even, odd) in patterns.items():
        layers = [odd if layer % 2 else even for layer in range(model.config.num_hidden_layers)]
        for layer in args.dense_layers:
            layers[layer] = None
        models[way] = hea.sparsify(copy.deepcopy(model), layers)
    results = {
        "command": " ".join(["python examples/sparsify_llama.py", *sys.argv[1:]]),
        "machine": describe_machine(model.device),
        "settings": {**asdict(args), "texts": len(texts)},
        "perplexity": {way: perplexities(each, texts) for way, each in models.items()}
        | {"the same, positions in the cache": perplexities(models[SINKS], texts, is_streamed=True)},
        "prompt_seconds": prompt_seconds(models, args.text_tokens),
    }
    models[SINKS].save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    (Path(args.output_dir) / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    for name, of_samples in {"perplexity": float, "prompt_seconds": median}.items():
        rows = [[way, *(f"{of_samples(each):.3g}" for each in found.values())] for way, found in results[name].items()]
        print("", markdown_table([name, *(f"up to {tokens:,}" for tokens in results[name][DENSE])], rows), sep="\n")
    print(f"\nWritten to {args.output_dir}: results.json, and the model with {SINKS}.")


@torch.no_grad()
def perplexities(model: Any, texts: torch.Tensor, is_streamed: bool = False) -> dict[int, float]:
    """Return the perplexity of tokens at positions 0 to 512, 512 to 1,024, 1,024 to 2,048 and so on."""
    losses, num_tokens = [], texts.shape[1]
    for text in texts:
        # chunks of a text go through a cache
        cache = hea.PatternCache(model, positions="cache") if is_streamed else None
        for chunk in torch.arange(num_tokens - 1).split(256 if is_streamed else num_tokens):
            logits = model(text[None, chunk], **{CACHE_ARGUMENT: cache}, use_cache=is_streamed).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits.float(), text[chunk + 1], reduction="none"))
    of_texts = torch.cat(losses).view(len(texts), -1)
    ends = [0, *(2**power for power in range(9, 31) if 2**power < num_tokens), num_tokens]
    return {end: math.exp(of_texts[:, start:end].mean()) for start, end in pairwise(ends)}


@torch.no_grad()
def prompt_seconds(models: dict[str, Any], longest: int) -> dict[str, dict[int, tuple[float, ...]]]:
    """Return the seconds of a prefill, by model and length, without the first run; the models take turns."""
    found: dict[str, Any] = {way: {} for way in models}
    for tokens in (2**power for power in range(9, 31) if 2**power <= longest):
        ids = torch.randint(models[DENSE].config.vocab_size, (1, tokens), device=models[DENSE].device)
        read = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1}
        cases = {way: Case(lambda _, model=model, read=read: model(**read)) for way, model in models.items()}
        for way, timing in time_interleaved(cases, 3, ids.device, description=f"{tokens:,} tokens").items():
            found[way][tokens] = timing.seconds
    return found


if __name__ == "__main__":
    main()
