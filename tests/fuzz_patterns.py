"""Mutated pattern dicts, expressions and config files: each is read and laid over a length, or refused by this package.

A script, which continuous integration runs with a new seed each day:

    python tests/fuzz_patterns.py --cases 300000 --seed 1
    python tests/fuzz_patterns.py --seconds 25

A case fails if it raises anything but an error of this package, says more than 500 characters, takes longer than a
second of the processor, or takes the process beyond 500 MB more than it had. A number has its own seed, so that one
case can be run again by the line that a failure prints.
"""

import argparse
import contextlib
import copy
import json
import logging
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging as transformers_logging

import hf_efficient_attn as hea
from hf_efficient_attn import patterns
from hf_efficient_attn.layout.plan import read_plan, write_plan
from hf_efficient_attn.patterns import Pattern, parse_pattern

MAX_SECONDS = 1.0
MAX_BYTES = 500 * 2**20
NUM_TOKENS = 40
PATTERNS: list[Pattern] = [
    patterns.Band(3, None) | patterns.GlobalTokens([0, -1]),
    patterns.Dilated(6, 0, 3) & ~patterns.KeyTable([[0], [1, 5], []]),
    patterns.PerHead([patterns.Causal(), patterns.Blocks(patterns.Band(1, 0), 4)]),
    patterns.RandomBlocks(2, 4, seed=3, exclude=patterns.Strided(5)),
    patterns.bigbird(4, 1, plan="authors"),
    patterns.SpanTree(2, is_causal=True),
    patterns.BlockLocal(8) | patterns.SizedSpanTree(7, 2),
]
EXPRESSIONS = [
    "band(3, None) | global(0, -1)",
    "dilated(6, 0, 3) & ~key_table([[0], [1, 5], []])",
    "per_head([causal(), blocks(band(1, right=0), 4)])",
    "random_blocks(2, 4, seed=3, exclude=strided(5)) | bigbird(4, 1, plan='authors')",
    "span_tree(2, is_causal=True) | block_local(8)",
]
SMALL = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
PIECES = [
    "band(",
    "full()",
    "|",
    "&",
    "~",
    "(",
    ")",
    "[",
    "]",
    ",",
    "None",
    "-1",
    "9" * 50,
    "'",
    "global",
    "left=",
    "\0",
]
VALUES: list[Callable[[random.Random], Any]] = [
    lambda draw: draw.choice([0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**63, 10**18, 10**30, -(10**18)]),
    lambda draw: draw.choice([0.5, -1.5, 1e300, float("nan"), float("inf")]),
    lambda draw: draw.choice([None, True, False, "", "full", "band", "a" * 5000, "\x00", "é"]),
    lambda draw: draw.choice([[], {}, [None], [[]], [[[1]]], {"kind": "full"}, {"kind": None}, {"a": 1}]),
    lambda draw: list(range(draw.choice([3, 300, 3000]))),
    lambda draw: [[draw.randrange(50) for _ in range(draw.randrange(6))] for _ in range(draw.randrange(30))],
    lambda draw: draw.choice(PATTERNS).to_dict(),
    lambda draw: nested(draw.choice(PATTERNS).to_dict(), draw.choice([3, 20, 40, 300])),
]


def nested(data: Any, levels: int) -> Any:
    """Return complements of complements, with unions in between."""
    for level in range(levels):
        data = (
            {"kind": "union", "patterns": [data, {"kind": "causal"}]}
            if level % 3 == 0
            else {"kind": "complement", "pattern": data}
        )
    return data


def places(data: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value within, at most some hundreds."""
    found: list[tuple[Any, Any]] = []
    left = [data]
    while left and len(found) < 300:
        each = left.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        for key in keys:
            found.append((each, key))
            left.append(each[key])
    return found


def mutate(data: Any, draw: random.Random) -> Any:
    """Return a copy of JSON types in which one to three values are others, are gone, moved, or under other names."""
    data = copy.deepcopy(data)
    for _ in range(draw.randint(1, 3)):
        spots = places(data)
        if not spots:
            return draw.choice(VALUES)(draw)
        container, key = draw.choice(spots)
        action = draw.randrange(8)
        if action == 0:
            container.pop(key)
        elif action == 1 and isinstance(container, dict):
            container[draw.choice(["kind", "left", "patterns", "pattern", "", "a" * 600])] = container.pop(key)
        elif action == 2:
            other, other_key = draw.choice(spots)
            # a value within itself would never end in a file
            value = other.get(other_key) if isinstance(other, dict) else None
            container[key] = copy.deepcopy(value)
        elif action == 3 and isinstance(container[key], int):
            container[key] = container[key] * draw.choice([-1, 10, 1000]) + draw.choice([-1, 0, 1])
        else:
            container[key] = draw.choice(VALUES)(draw)
    return data


def mutate_text(text: str, draw: random.Random) -> str:
    """Return a text with pieces put in, taken out, repeated or replaced."""
    for _ in range(draw.randint(1, 4)):
        first = draw.randrange(len(text) + 1)
        last = min(len(text), first + draw.choice([0, 1, 2, 8]))
        piece = draw.choice([*PIECES, draw.choice(PIECES) * draw.choice([2, 50, 1000])])
        text = text[:first] + draw.choice(["", piece, text[first:last] * 2]) + text[last:]
    return text


def use(pattern: Pattern) -> None:
    """Ask a pattern for everything that a call of attention asks, and write it in every form."""
    assert Pattern.from_dict(json.loads(json.dumps(pattern.to_dict()))) == pattern
    assert read_plan(write_plan(pattern, 0, ()))[0] == pattern
    pattern.causal()
    heads = pattern.num_head_patterns
    drawn = pattern.resolve(NUM_TOKENS, 1, 0, heads)
    for each in (drawn, drawn.causal()):
        spans = each.key_spans(3, 3, NUM_TOKENS)
        queries, keys = torch.tensor([[3]]), torch.arange(NUM_TOKENS)[None]
        row = each.allowed(queries, keys)[0].nonzero().flatten().tolist()
        assert row == [key for start, stop in spans for key in range(start, stop)], "allowed and key_spans differ"
        each.num_pairs(NUM_TOKENS, NUM_TOKENS)
        assert each.members()
    q = torch.zeros(1, heads, NUM_TOKENS, 8)
    if heads <= 8:
        hea.attention(q, q, q, pattern)


def a_dict(draw: random.Random, folder: Path) -> None:
    use(Pattern.from_dict(mutate(draw.choice(PATTERNS).to_dict(), draw)))


def an_expression(draw: random.Random, folder: Path) -> None:
    use(parse_pattern(mutate_text(draw.choice(EXPRESSIONS), draw)))


def a_config_file(draw: random.Random, folder: Path) -> None:
    """Read a config.json of one of our families, or of a Llama with a pattern, which then attends."""
    config = draw.choice(CONFIGS)()
    written = mutate(
        json.loads(config.to_json_string(use_diff=False)) if draw.random() < 0.5 else config.to_dict(), draw
    )
    if isinstance(written, dict):
        # without it no class of ours is asked
        written |= {"model_type": config.model_type}
        if config.model_type == "llama":
            # transformers makes a list of so many labels
            written.pop("num_labels", None)
    (folder / "config.json").write_text(json.dumps(written))
    read = AutoConfig.from_pretrained(folder)
    if config.model_type == "llama":
        # the pattern is read where the model first attends; its sizes are not ours to check
        fresh = llama()
        fresh.attention_pattern = read.attention_pattern
        model = AutoModelForCausalLM.from_config(fresh, attn_implementation="efficient").eval()
        with torch.no_grad():
            model(torch.ones(1, 15, dtype=torch.long))


def llama() -> Any:
    config = LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, max_position_embeddings=64, **SMALL)
    return hea.sparsify(config, PATTERNS[1])


CONFIGS: list[Callable[[], Any]] = [
    llama,
    lambda: hea.SimplifiedTransformerConfig(num_hidden_layers=2, max_position_embeddings=64, **SMALL),
    lambda: hea.AdaptiveSpanConfig(num_hidden_layers=2, span_limit=16, **SMALL),
    lambda: hea.SparseTransformerConfig(
        num_hidden_layers=2, max_position_embeddings=64, attention_pattern=[PATTERNS[1], None], **SMALL
    ),
    lambda: hea.SparseSeq2SeqConfig(
        encoder_layers=2, decoder_layers=1, max_position_embeddings=64, attention_pattern=PATTERNS[3], **SMALL
    ),
]
# most cases in the time that there is
KINDS: list[Callable[[random.Random, Path], None]] = [a_dict] * 5 + [an_expression] * 4 + [a_config_file]


def problem(error: Exception) -> str | None:
    """Return what is wrong with an error; None: it is a refusal, of ours, or of transformers before we are asked."""
    if isinstance(error, hea.EfficientAttentionError):
        return f"{len(str(error))} characters" if len(str(error)) > 500 else None
    # a file that says too little, or is none, is refused before a class of ours is asked; and every config is written
    # through a function of ours
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    is_ours = any("hf_efficient_attn/" in name and not name.endswith("saved_implementation.py") for name in frames)
    return "".join(traceback.format_exception(error)[-6:]) if is_ours else None


def run_case(seed: int, number: int, folder: Path) -> str | None:
    """Return what is wrong with a case; None: nothing."""
    draw = random.Random(f"{seed} {number}")
    kind = draw.choice(KINDS)
    before, started = peak_bytes(), time.process_time()
    try:
        kind(draw, folder)
        found = None
    except Exception as error:
        found = problem(error)
    seconds = time.process_time() - started
    if found is None and seconds > MAX_SECONDS:
        found = f"{seconds:.1f} seconds"
    if found is None and peak_bytes() - before > MAX_BYTES:
        found = f"{(peak_bytes() - before) >> 20} MB"
    return None if found is None else f"{kind.__name__}: {found}"


def peak_bytes() -> int:
    """Return the most memory that the process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Run the cases, or one again; exit code 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=10**9, help="at most so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most so long")
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")), help="default: the day")
    parser.add_argument("--only", type=int, help="one case, by its number")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    args = parser.parse_args()
    quiet()
    print(f"seed {args.seed}", flush=True)
    stop, failures, done = time.monotonic() + args.seconds, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        # what is imported and built once takes its time before the cases
        for kind, number in zip(sorted(set(KINDS), key=str) * 20, range(60), strict=True):
            with contextlib.suppress(Exception):
                kind(random.Random(number), Path(folder))
        for number in range(args.cases) if args.only is None else (args.only,):
            if time.monotonic() > stop or failures >= args.failures:
                break
            found = run_case(args.seed, number, Path(folder))
            done += 1
            if found is not None:
                failures += 1
                print(f"python tests/fuzz_patterns.py --seed {args.seed} --only {number}\n{found}\n", flush=True)
    print(f"{done} cases, {failures} failures", flush=True)
    sys.exit(1 if failures else 0)


def quiet() -> None:
    """Say nothing of what transformers notes about strange configs."""
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity(logging.CRITICAL)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
