"""Compute attention of texts that lie on several processes, and compare it with one process in float64.

    torchrun --nproc_per_node 3 sharded_attention_script.py FOLDER

Every process writes FOLDER/{number of processes}-{rank}.json: by case and mode the largest error of the outputs and of
every gradient. It checks that it sends and receives as many bytes as the formula and `explain` say.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

import hf_efficient_attn as hea
from hf_efficient_attn.attention.build_call import LayerPattern
from hf_efficient_attn.attention.sharded.layer import attend_shard, exchange_of
from hf_efficient_attn.attention.sharded.plan import HeadSizes, Traffic
from hf_efficient_attn.attention.sharded.shards import SequenceShards, sequences_of, shard_bounds
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.score_terms import Distance, Slope, SoftSpan, Term
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns import (
    Band,
    BlockLocal,
    BlockTopK,
    Causal,
    Dilated,
    Full,
    GlobalTokens,
    Grid,
    Pattern,
    PerHead,
    RandomBlocks,
    Strided,
    bigbird,
)

# its class that counts what is sent
sys.path.append(str(Path(__file__).parents[1] / "model_cards" / "benchmarks"))

from sequence import Link  # noqa: E402

BATCH, DIM = 2, 4


@dataclass(frozen=True)
class Case:
    """A call: its pattern, length and heads; which masks it has; and what else its scores are made of."""

    pattern: Pattern
    tokens: int = 29
    heads: int = 6
    key_heads: int = 6
    masks: tuple[str, ...] = ()
    has_sinks: bool = False
    softcap: float | None = None
    ramp: int | None = None
    labels: int | None = None
    is_table: bool = False
    has_slopes: bool = False
    modes: tuple[str, ...] = ("halo", "heads", "auto")

    @property
    def has_terms(self) -> bool:
        return self.ramp is not None or self.labels is not None or self.has_slopes


CASES = {
    "band": Case(Band(3, 2)),
    "causal band": Case(Band(4, 0), tokens=24, key_heads=2),
    "several hops": Case(Band(17, 3), key_heads=3),
    "as long as a shard": Case(Band(7, 7), tokens=28),
    "one token each": Case(Band(1, 1), tokens=4),
    "block local": Case(BlockLocal(5)),
    "dilated": Case(Dilated(9, 6, 3)),
    "globals": Case(Band(2, 2) | GlobalTokens([0, 13, -1])),
    "heads with globals": Case(PerHead([Band(2, 2), Dilated(4, 4, 2)]) | GlobalTokens([0, 17, -1])),
    "first tokens": Case(Band(3, 0) | GlobalTokens([0, 1]).causal(), key_heads=1),
    "random blocks": Case(RandomBlocks(2, 3, seed=1) | Band(1, 1)),
    "bigbird": Case(bigbird(3, 2), tokens=40, key_heads=2),
    "causal bigbird": Case(bigbird(3, 2, causal=True), tokens=40),
    "union": Case(Dilated(8, 0, 4) | BlockLocal(4) | Band(2, 0) | GlobalTokens([5], attends_to_all=False)),
    "heads differ": Case(PerHead([Band(2, 0), Dilated(9, 0, 3), Band(1, 0) | GlobalTokens([0]).causal()])),
    "grid": Case(Grid([6, 5], [Band(1, 1), Band(1, 2)]), tokens=30, key_heads=2),
    "grid and prefix": Case(Grid([None, 4], [Band(1, 1), Band(0, 0)], 2, "shifted"), tokens=30),
    "causal grid": Case(Grid([4, 8], [Band(2, 2), Band(2, 2)], is_causal=True), masks=("padding",)),
    "full": Case(Full(), key_heads=2),
    "causal": Case(Causal()),
    "block top k": Case(BlockTopK(3, 3), heads=12, key_heads=2, modes=("heads", "auto")),
    "strided": Case(Strided(3)),
    "padded": Case(Band(4, 2), masks=("padding",)),
    "packed": Case(Band(6, 3), masks=("documents",)),
    "packed and padded": Case(Band(6, 0) | GlobalTokens([0]), masks=("padding", "documents")),
    "packed bigbird": Case(bigbird(2, 1), masks=("padding", "documents"), tokens=40, key_heads=3),
    "holes": Case(Band(5, 5) | GlobalTokens([1]), masks=("holes",)),
    "chosen globals": Case(Band(2, 2), masks=("padding", "chosen")),
    "sinks": Case(Band(3, 0), has_sinks=True),
    "sinks and globals": Case(Band(2, 2) | GlobalTokens([0, 9]), has_sinks=True, softcap=2.0, key_heads=2),
    "spans": Case(Band(8, 0), ramp=4),
    "spans in documents": Case(Band(8, 8), ramp=4, masks=("documents",)),
    # whose halo does not keep distances
    "spans and globals": Case(Band(4, 0) | GlobalTokens([0]).causal(), ramp=4, modes=("heads", "auto")),
    "slopes": Case(Band(6, 3), has_slopes=True, masks=("documents",)),
    "slopes, causal": Case(Causal(), has_slopes=True, key_heads=2, masks=("padding",)),
    "slopes and globals": Case(Band(4, 0) | GlobalTokens([0]).causal(), has_slopes=True, modes=("heads", "auto")),
    "distances": Case(Band(4, 2), labels=5, key_heads=2),
    "distances per head": Case(PerHead([Band(2, 2), Dilated(6, 6, 3)]), labels=5, modes=("heads", "auto")),
    "one token each, by distance": Case(Band(1, 1), tokens=5, labels=3),
    "distances for all queries": Case(Full(), labels=5, is_table=True, masks=("padding",)),
}


def masks_of(case: Case) -> TokenMask:
    """Return the masks of the whole text."""
    index = torch.arange(case.tokens).expand(BATCH, -1)
    masks = {"key_mask": torch.ones_like(index, dtype=torch.bool)}
    if "padding" in case.masks:
        # on either side, and more than a shard
        masks["key_mask"] = torch.stack([index[0] >= case.tokens // 2 - 1, index[1] < case.tokens - 4])
    if "holes" in case.masks:
        masks["key_mask"] = (index % 7 != 3) & (index != 0)
    if "documents" in case.masks:
        masks["segment_ids"] = torch.stack([index[0] // 11, (index[1] >= 6).int() + (index[1] >= 17).int()])
    if "chosen" in case.masks:
        masks["global_mask"] = torch.stack([index[0] == case.tokens - 2, index[1] % 9 == 4])
    return TokenMask(**masks)


def formula(case: Case, size: int, mode: str) -> Traffic:
    """Return what is to be exchanged."""
    layout = Layout(case.pattern, case.heads, case.tokens, case.tokens, layer=1 if case.pattern.is_random else 0)
    texts = tuple(dict.fromkeys(sequences_of(masks_of(case), BATCH, case.tokens)))
    bounds, values = shard_bounds(case.tokens, size), (1 if case.ramp else 0) + (case.labels or 0)
    sizes = HeadSizes(case.heads, case.key_heads, DIM, DIM, 0 if case.is_table else values)
    return exchange_of(layout, texts, bounds, sizes, mode, case.has_terms)[1]


def explained(case: Case, size: int) -> Any:
    """Return what `explain` says is exchanged, for a text without masks."""
    heads = {"num_heads": case.heads, "num_key_heads": case.key_heads, "head_dim": DIM}
    explanation = hea.explain(case.pattern, case.tokens, dtype=torch.float64, layer=1, sequence_ranks=size, **heads)
    return explanation.exchange


def states_of(case: Case) -> dict[str, Tensor]:
    """Return the whole text's queries, keys and values, and what else is learned."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    states = {
        "q": draw(BATCH, case.heads, case.tokens, DIM),
        "k": draw(BATCH, case.key_heads, case.tokens, DIM),
        "v": draw(BATCH, case.key_heads, case.tokens, DIM),
        "weights": draw(BATCH, case.heads, case.tokens, DIM),
    }
    if case.has_sinks:
        states["sinks"] = draw(case.heads)
    if case.ramp:
        states["spans"] = draw(BATCH, case.heads, case.tokens, 1).abs()
    if case.labels:
        states["distances"] = draw(BATCH, case.heads, 1 if case.is_table else case.tokens, case.labels)
    if case.has_slopes:
        states["slopes"] = draw(1, case.heads, 1, 1).abs()
    return states


def terms_of(case: Case, states: dict[str, Tensor]) -> tuple[Term, ...]:
    """Return the learned parts of the scores."""
    spans = (Term(states["spans"], SoftSpan(case.ramp)),) if case.ramp else ()
    labels = case.labels or 0
    distances = (Term(states["distances"], Distance(-(labels // 2), labels // 2)),) if labels else ()
    slopes = (Term(states["slopes"], Slope()),) if case.has_slopes else ()
    return spans + distances + slopes


def is_of_all(case: Case, name: str) -> bool:
    """Return whether what is learned is the same for all tokens."""
    return name in ("sinks", "slopes") or (name == "distances" and case.is_table)


def alone(case: Case) -> dict[str, Tensor]:
    """Return the output of one process, and all gradients."""
    states = {name: each.requires_grad_(name != "weights") for name, each in states_of(case).items()}
    masks = masks_of(case)
    out = hea.attention(
        *(states[name] for name in "qkv"),
        case.pattern,
        key_mask=masks.key_mask,
        segment_ids=masks.segment_ids,
        global_mask=masks.global_mask,
        terms=terms_of(case, states),
        sinks=states.get("sinks"),
        softcap=case.softcap,
        backend="reference",
        layer=1,
    )
    (out * states["weights"]).sum().backward()
    return {"out": out.detach(), **{name: each.grad for name, each in states.items() if each.grad is not None}}


def together(case: Case, shards: SequenceShards) -> dict[str, Tensor]:
    """Return the output of this process's tokens, and the gradients that it finds."""
    own = slice(*shard_bounds(case.tokens, shards.size)[shards.rank])
    states = {
        name: (each if is_of_all(case, name) else each[:, :, own]).clone().requires_grad_(name != "weights")
        for name, each in states_of(case).items()
    }
    layer_spec = LayerPattern(case.pattern, layer=1, is_own=False)
    options: dict[str, Any] = {"sinks": states.get("sinks"), "softcap": case.softcap}
    options["terms"] = terms_of(case, states)
    expected = formula(case, shards.size, shards.mode)
    with Link(0) as forward:
        out = attend_shard(*(states[name] for name in "qkv"), layer_spec, shards, masks_of(case), DIM**-0.5, **options)
    with Link(0) as backward:
        (out * states["weights"]).sum().backward()
    check_bytes(case, expected, forward, backward, shards)
    found = {name: each.grad for name, each in states.items() if each.grad is not None}
    for name in filter(lambda name: is_of_all(case, name), found):
        distributed.all_reduce(found[name])
    return {"out": out.detach(), **found}


def check_bytes(case: Case, expected: Traffic, forward: Link, backward: Link, shards: SequenceShards) -> None:
    """Check that what was measured is what the formula says, and what `explain` says where it knows the text."""
    rank, width = shards.rank, BATCH * torch.float64.itemsize
    assert (forward.sent, forward.received) == (width * expected.sent[rank], width * expected.received[rank])
    assert (backward.received, backward.sent) == (forward.sent, forward.received)
    assert (forward.reduced, backward.reduced) == (width * expected.reduced, width * expected.reduced_backward)
    if case.masks or case.has_terms or shards.mode != "auto":
        return
    exchange = explained(case, shards.size)
    found = exchange.mode, BATCH * exchange.forward_bytes[rank], BATCH * exchange.backward_bytes[rank]
    assert found == (expected.mode, forward.sent, backward.sent)
    assert [BATCH * each for each in exchange.reduced_bytes] == [forward.reduced, backward.reduced]


def errors(case: Case, expected: dict[str, Tensor], found: dict[str, Tensor], own: slice) -> dict[str, float]:
    """Return the largest difference of every result."""
    assert expected.keys() == found.keys()
    whole = {name: each if is_of_all(case, name) else each[:, :, own] for name, each in expected.items()}
    return {name: float((whole[name] - each).abs().max()) for name, each in found.items()}


def main(folder: Path) -> None:
    """Compare every case in every mode that it has."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    report = {}
    for name, case in CASES.items():
        if case.tokens < size:
            continue
        expected = alone(case)
        own = slice(*shard_bounds(case.tokens, size)[rank])
        for mode in case.modes:
            try:
                report[f"{name}, {mode}"] = errors(case, expected, together(case, SequenceShards(mesh, mode)), own)
            except Exception as error:
                raise RuntimeError(f"{name}, {mode}") from error
    (folder / f"{size}-{rank}.json").write_text(json.dumps(report))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
