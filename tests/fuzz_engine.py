"""Random calls of `hf_efficient_attn.attention` against a dense float64 formula: outputs, log-sum-exp and gradients.

python tests/fuzz_engine.py --seconds 120                # seed of the day, printed
python tests/fuzz_engine.py --seed 20260101 --case 4711  # one case again
"""

import argparse
import datetime
import random
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from fuzz_cases import Case, draw_case
from fuzz_choices import counts_of
from fuzz_formula import Head, Scores, bias_of, cross_pairs_and_distances, formula, magnitudes, pairs_and_distances
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.layout.score_terms import Term

# how much more than these an engine may err: it adds in another order
FACTOR = 6
# what sums of a few numbers may lose that are rounded to zero, since they are below the smallest normal one
UNDERFLOW = 64 * torch.finfo(torch.float32).smallest_normal

Results = dict[str, Tensor]


def engine(case: Case) -> Results:
    """Return what the engine computes, in float64."""
    leaves = {
        name: tensor.to(case.dtype, copy=True).requires_grad_(name in case.learned)
        for name, tensor in case.tensors.items()
    }
    views = {name: case.views[name](leaf) for name, leaf in leaves.items()}
    terms = [Term(views[f"term {number}"], label) for number, label in enumerate(case.labels)]
    with torch.no_grad() if case.backend == "flex" else torch.enable_grad():
        found: Any = hea.attention(
            *(views[name] for name in ("q", "k", "v")),
            case.pattern,
            scale=case.scale,
            **vars(case.masks),
            cross=case.is_cross,
            query_mask=case.query_masks and case.query_masks.key_mask,
            query_segment_ids=case.query_masks and case.query_masks.segment_ids,
            terms=terms,
            sinks=views.get("sinks"),
            softcap=case.softcap,
            backend=case.backend,
            return_lse=case.need_lse,
            query_offset=case.offset,
            layer=case.layer,
            first_head=case.first_head,
            num_model_heads=case.num_model_heads,
            chosen=case.chosen,
        )
    out, lse = found if case.need_lse else (found, None)
    assert out.dtype == case.dtype, f"the output has dtype {out.dtype}"
    results = {"out": out} | ({} if lse is None else {"lse": lse})
    return finished(results, leaves, views["grad"], case)


def rows_of(case: Case) -> slice:
    """Return the positions of the queries."""
    queries, keys = case.sizes[3:5]
    offset = (0 if case.is_cross else keys - queries) if case.offset is None else case.offset
    return slice(offset, offset + queries)


def pairs_of(case: Case) -> tuple[Tensor, Tensor]:
    """Return the allowed pairs [batch, heads, queries, keys], and the distances [queries, keys]."""
    batch, heads, _, _, keys, *_ = case.sizes
    rows = rows_of(case)
    total = case.num_model_heads or heads
    listed = [Head(case.layer, head, total) for head in range(case.first_head, case.first_head + heads)]
    if case.query_masks is not None:
        extent = (batch, rows.stop, keys)
        allowed, distances = cross_pairs_and_distances(case.pattern, (case.query_masks, case.masks), extent, listed)
    else:
        allowed, distances = pairs_and_distances(case.pattern, case.masks, batch, keys, listed)
    allowed, distances = allowed[:, :, rows], distances[rows]
    return (allowed if case.chosen is None else allowed & selected_pairs(case, allowed, distances)), distances


def counts_of_case(case: Case) -> Tensor:
    """Return how often its choice says that each pair is read."""
    return counts_of(case.chosen, case.masks, case.sizes[:5], rows_of(case).start)


def selected_pairs(case: Case, allowed: Tensor, distances: Tensor) -> Tensor:
    """Return the pairs that are chosen; in an order, a query reads itself only where it may read nothing else."""
    chosen = counts_of_case(case) > 0
    if not getattr(case.chosen, "attends_to_self_last", False):
        return chosen
    is_other = distances != 0
    readable = allowed & chosen & is_other
    # a span that ends before a key forbids it
    for number, label in enumerate(case.labels):
        term = case.views[f"term {number}"](case.tensors[f"term {number}"])
        readable = readable & (bias_of(term, label, distances) > -torch.inf)
    return chosen & (is_other | ~readable.any(-1, keepdim=True))


@dataclass
class Exact:
    """What the formula gives for a case, in float64.

    Attributes:
        results: as `engine` returns them.
        sizes: the largest sum of absolute values behind each of the results.
        largest: the largest score.
    """

    results: Results
    sizes: dict[str, float]
    largest: float


def exact(case: Case, allowed: Tensor, distances: Tensor, dtype: torch.dtype) -> Exact:
    """Return what the formula gives in a dtype."""
    leaves = {name: tensor.to(dtype, copy=True).requires_grad_() for name, tensor in case.tensors.items()}
    views = {name: case.views[name](leaf) for name, leaf in leaves.items()}
    if case.has_sinks and len(views["sinks"]) != case.sizes[1]:
        views["sinks"] = views["sinks"][case.first_head : case.first_head + case.sizes[1]]
    biases = [bias_of(views[f"term {n}"], label, distances) for n, label in enumerate(case.labels)]
    bias = sum(biases[1:], biases[0]) if biases else None
    if case.chosen is not None:
        # a key that is read several times counts as often
        often = counts_of_case(case).clamp(min=1).to(dtype).log()
        bias = often if bias is None else bias + often
    scale = case.sizes[5] ** -0.5 if case.scale is None else case.scale
    q, k, v = (views[name] for name in ("q", "k", "v"))
    answer = formula(q, k, v, allowed, Scores(scale, case.softcap, bias, sinks_of(case, views)))
    results = {"out": answer.out} | ({"lse": answer.lse} if case.need_lse else {})
    found = finished(results, leaves, views["grad"], case)
    sums, of_scores = magnitudes(q, k, v, views["grad"].detach(), answer, scale)
    sizes = {"out": float(sums["out"].max()), "lse": 1.0 + answer.largest}
    for name in case.learned:
        if name in sums:
            (size,) = torch.autograd.grad(views[name], leaves[name], sums[name])
        else:
            added = biases[int(name.removeprefix("term "))].masked_fill(of_scores == 0, 0.0)
            (size,) = torch.autograd.grad(
                added, leaves[name], of_scores.expand(added.shape) if added.dim() == 4 else of_scores
            )
        sizes[f"gradient of {name}"] = float(size.abs().max())
    return Exact(found, sizes, answer.largest)


def sinks_of(case: Case, views: dict[str, Tensor]) -> Tensor | None:
    """Return what counts beside the keys of every query, [batch or 1, heads, queries or 1]; none counts at padding."""
    if not case.has_sinks:
        return None
    is_token = torch.ones(1, 1, dtype=torch.bool)
    key_mask = (case.query_masks or case.masks).key_mask
    if key_mask is not None:
        is_token = key_mask[:, rows_of(case)]
    return views["sinks"][:, None].where(is_token[:, None], -torch.inf)


def finished(results: Results, leaves: dict[str, Tensor], grad: Tensor, case: Case) -> Results:
    """Return the results with the gradients of what is learned, in float64."""
    if case.learned:
        asked = [leaves[name] for name in case.learned]
        gradients = torch.autograd.grad(results["out"], asked, grad.detach(), retain_graph=True, allow_unused=True)
        for name, leaf, gradient in zip(case.learned, asked, gradients, strict=True):
            results[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: tensor.detach().double() for name, tensor in results.items()}


def faults(case: Case) -> list[str]:
    """Return what the engine computes otherwise than the formula, beyond what rounding explains."""
    pairs = pairs_of(case)
    correct = exact(case, *pairs, torch.float64)
    # float64 has no lower precision to compare with but float32, whose errors are so much larger
    coarse = torch.float32 if case.dtype == torch.float64 else case.dtype
    ratio = torch.finfo(case.dtype).eps / torch.finfo(coarse).eps
    rounded = exact(case, *pairs, coarse)
    found = engine(case)
    digit, score_digit = torch.finfo(case.dtype).eps, min(torch.finfo(case.dtype).eps, torch.finfo(torch.float32).eps)
    wrong = []
    for name, right in correct.results.items():
        known = right.isfinite()
        if not torch.equal(known, found[name].isfinite()):
            differing = int((known != found[name].isfinite()).sum())
            wrong.append(f"{name}: {differing} numbers are finite and should not be, or the other way round")
            continue
        if not known.any():
            continue
        error, typical = (
            (each[name] - right)[known].abs().nan_to_num(torch.inf).max() for each in (found, rounded.results)
        )
        noise = (digit + score_digit * (1 + correct.largest)) * correct.sizes[name]
        allowed = FACTOR * (ratio * typical.nan_to_num(0.0, 0.0) + noise) + UNDERFLOW
        if not error <= allowed:
            wrong.append(f"{name}: off by {error:.2e}, {allowed:.2e} is allowed")
    return wrong


def run_case(seed: int, number: int, verbose: bool = False) -> str | None:
    """Return what is wrong with a case, None if nothing is; count what it was about."""
    rng = random.Random(f"{seed} {number}")
    case = None
    try:
        case = draw_case(rng)
        if verbose:
            print(case)
        wrong = faults(case)
    except Exception as error:  # noqa: BLE001 - whatever is raised is the finding
        if verbose:
            raise
        wrong = [f"{type(error).__name__}: {str(error)[:300]}"]
    if not wrong:
        return None
    return f"python tests/fuzz_engine.py --seed {seed} --case {number}  # {'; '.join(wrong)}\n  {case}"


def main() -> int:
    """Run cases; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--cases", type=int, help="how many, however long they take")
    parser.add_argument("--seed", type=int, default=int(datetime.date.today().strftime("%Y%m%d")))
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="only this one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # tokens without a key are wanted here
    warnings.simplefilter("ignore", UserWarning)
    if args.case is not None:
        wrong = run_case(args.seed, args.case, verbose=True)
        print(wrong or "nothing wrong")
        return 1 if wrong else 0
    print(f"seed {args.seed}", flush=True)
    start, done, failed = time.monotonic(), 0, Counter[str]()
    while (time.monotonic() - start < args.seconds) if args.cases is None else done < args.cases:
        wrong = run_case(args.seed, args.first + done)
        done += 1
        if wrong:
            failed["cases"] += 1
            print(wrong, flush=True)
        if done % 1000 == 0:
            print(f"{done} cases, {failed['cases']} wrong, {time.monotonic() - start:.0f} s", flush=True)
    print(f"seed {args.seed}: {done} cases in {time.monotonic() - start:.0f} s, {failed['cases']} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
