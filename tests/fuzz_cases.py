"""Random calls of attention, for `tests/fuzz_engine.py`: sizes, memory, masks, terms, sinks, caps, scales, backends."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from fuzz_choices import draw_choice
from fuzz_drawn import draw_fitted, draw_pattern
from fuzz_formula import Masks
from torch import Tensor

from hf_efficient_attn.attention.select import BACKENDS
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.layout.call import AttentionCall, Inputs
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.score_terms import Distance, Label, SoftSpan
from hf_efficient_attn.layout.selected_keys import ChosenKeys
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns import Pattern

DRAWN_BACKENDS = ("auto", "blocked", "sdpa", "reference")
CHOSEN_BACKENDS = ("auto", "gathered", "gathered", "sdpa", "reference")
CHOSEN_SHARE = 0.2
# what flex compiles takes seconds
FLEX_SHARE = 1 / 1000
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = ("batch", "heads", "key heads", "queries", "keys", "width", "value width")
# (tensor of one shape) -> (another tensor of this shape that lies otherwise in memory)
View = Callable[[Tensor], Tensor]


@dataclass
class Case:
    """A call, its tensors in float64 with the numbers that the dtype can have."""

    pattern: Pattern
    sizes: tuple[int, int, int, int, int, int, int]
    dtype: torch.dtype
    tensors: dict[str, Tensor]
    views: dict[str, View]
    learned: list[str]
    masks: Masks = field(default_factory=Masks)
    query_masks: Masks | None = None
    labels: list[Label] = field(default_factory=list)
    scale: float | None = None
    softcap: float | None = None
    offset: int | None = None
    layer: int = 0
    first_head: int = 0
    num_model_heads: int | None = None
    backend: str = "auto"
    need_lse: bool = True
    chosen: ChosenKeys | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_cross(self) -> bool:
        """Whether queries and keys are of different sequences; the masks of the queries are then never None."""
        return self.query_masks is not None

    @property
    def has_sinks(self) -> bool:
        """Whether every head has a sink."""
        return "sinks" in self.tensors

    def __str__(self) -> str:
        masks = [name for name, mask in vars(self.masks).items() if mask is not None]
        sizes = dict(
            zip(("batch", "heads", "key heads", "queries", "keys", "width", "value width"), self.sizes, strict=True)
        )
        options = (f"backend={self.backend}", f"offset={self.offset}", f"layer={self.layer}", f"scale={self.scale}")
        options += (f"softcap={self.softcap}", f"sinks={self.tensors['sinks'].tolist() if self.has_sinks else None}")
        masks += [f"cross, queries {vars(self.query_masks)}"] if self.query_masks else []
        masks += [f"heads from {self.first_head} of {self.num_model_heads}"] if self.num_model_heads else []
        options += () if self.chosen is None else (f"chosen={self.chosen.traits}",)
        about = (str(self.dtype), *options, f"lse={self.need_lse}", f"masks={masks}", f"learned={self.learned}")
        return "\n  ".join([str(self.pattern), str(sizes), " ".join(about), f"terms={self.labels} {self.notes}"])


def draw_case(rng: random.Random) -> Case:
    """Draw a call."""
    torch.manual_seed(rng.randrange(2**31))
    backend = "flex" if rng.random() < FLEX_SHARE else rng.choice(DRAWN_BACKENDS)
    batch, heads = rng.randint(1, 3), rng.choice((1, 2, 2, 4, 4, 6))
    key_heads = rng.choice([number for number in range(1, heads + 1) if heads % number == 0])
    keys = rng.choice((rng.randint(1, 24), rng.randint(1, 24), rng.randint(20, 80), rng.randint(60, 230)))
    model_heads = heads if rng.random() < 0.7 else heads * rng.randint(2, 3)
    fitted = draw_fitted(rng)
    pattern, keys = fitted or (draw_pattern(rng, model_heads, keys), keys)
    masks = Masks()
    if fitted is not None and rng.random() < 0.5:
        masks, keys = draw_whole_documents(rng, batch, keys)
    may_be_cross = fitted is None and not pattern.depends_on_length
    is_cross = pattern.needs_two_axes or (may_be_cross and rng.random() < 0.15)
    queries, offset = draw_queries(rng, keys, is_cross)
    width = rng.choice((1, 2, 3, 4, 8, 16))
    value_width = width if rng.random() < 0.7 else rng.randint(1, 12)
    dtype = rng.choice(DTYPES)
    sizes = (batch, heads, key_heads, queries, keys, width, value_width)
    case = Case(pattern, sizes, dtype, {}, {}, [], offset=offset, backend=backend)
    if model_heads > heads:
        case.first_head, case.num_model_heads = rng.randint(0, model_heads - heads), model_heads
    shapes = {
        "q": (batch, heads, queries, width),
        "k": (batch, key_heads, keys, width),
        "v": (batch, key_heads, keys, value_width),
        "grad": (batch, heads, queries, value_width),
    }
    for name, shape in shapes.items():
        add_tensor(case, rng, name, shape)
    case.masks = draw_masks(rng, batch, keys) if fitted is None else masks
    if fitted is None:
        add_terms(case, rng)
    if is_cross:
        add_query_masks(case, rng)
    hash_ids(case, rng)
    if rng.random() < 0.08:
        enlarge_scores(case, rng)
    add_sinks(case, rng)
    case.softcap = rng.choice((0.3, 2.0, 30, 1e30)) if rng.random() < 0.15 else None
    if backend == "flex" and flex.why_not(call_of(case)) is not None:
        case.backend = "auto"
    case.scale = rng.choice((None, None, 0.3, 1.0, -0.5, 0.0))
    case.layer, case.need_lse = rng.choice((0, 0, 1, 5)), rng.random() < 0.6
    if backend != "flex":
        names = ["q", "k", "v", *(f"term {n}" for n in range(len(case.labels))), *(["sinks"] if case.has_sinks else [])]
        case.learned = [name for name in names if rng.random() < 0.6]
    if case.backend == "sdpa" and (case.softcap is not None or (case.has_sinks and case.learned)):
        # it says that it computes no cap, and sinks only where nothing is learned
        case.backend = rng.choice(("auto", "blocked", "reference"))
    add_choice(case, rng)
    return case


def add_choice(case: Case, rng: random.Random) -> None:
    """Draw chosen keys for some cases, and a backend that computes them."""
    if case.backend == "flex" or rng.random() > CHOSEN_SHARE:
        return
    case.chosen = draw_choice(rng, case.sizes[:5], case.is_cross)
    case.backend = rng.choice(CHOSEN_BACKENDS)
    learns_sinks = case.backend == "sdpa" and case.has_sinks and case.learned
    if case.backend != "auto" and (learns_sinks or BACKENDS[case.backend].why_not(call_of(case)) is not None):
        case.backend = "auto"


def draw_queries(rng: random.Random, keys: int, is_cross: bool) -> tuple[int, int | None]:
    """Draw how many queries there are, and the position of the first of them."""
    if is_cross:
        return rng.randint(1, 120), rng.choice((None, 0, rng.randint(1, 40)))
    if rng.random() < 0.35:
        queries = rng.randint(1, keys)
        return queries, rng.choice((None, rng.randint(0, keys - queries)))
    return keys, rng.choice((None, 0))


def call_of(case: Case) -> AttentionCall:
    """Return the call of a case, without its terms and what is learned."""
    batch, heads, key_heads, queries, keys, width, value_width = case.sizes
    layout = Layout(case.pattern, heads, queries, keys, 0, 0, case.first_head, case.num_model_heads, case.is_cross)
    inputs = Inputs("cpu", case.dtype, width, value_width, key_heads, batch)
    sinks = case.tensors.get("sinks")
    tokens = TokenMask(**vars(case.masks))
    return AttentionCall(layout, inputs, tokens, sinks=sinks, softcap=case.softcap, chosen=case.chosen)


def add_tensor(case: Case, rng: random.Random, name: str, shape: tuple[int, ...]) -> None:
    """Draw a tensor of a case and where it lies."""
    view, stored, note = draw_view(rng, shape)
    case.tensors[name] = torch.randn(stored).to(case.dtype).double()
    case.views[name] = view
    case.notes += [f"{name}: {note}"] if note else []


def draw_view(rng: random.Random, shape: tuple[int, ...]) -> tuple[View, tuple[int, ...], str]:
    """Return how a stored tensor becomes one of `shape`, the shape that is stored, and a note."""
    kind = rng.choice(("plain", "plain", "tokens first", "mixed", "mixed", "overlap"))
    if kind == "plain":
        return (lambda tensor: tensor), shape, ""
    if kind == "tokens first":
        return (lambda tensor: tensor.transpose(1, 2)), (shape[0], shape[2], shape[1], shape[3]), kind
    if kind == "overlap":
        strides = tuple(rng.randint(0, 5) for _ in shape)
        start = rng.randint(0, 3)
        number = 1 + start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return (lambda tensor: tensor.as_strided(shape, strides, start)), (number,), f"strides {strides}"
    order = rng.sample(range(4), 4)
    expanded = [rng.random() < 0.2 for _ in shape]
    steps = [rng.choice((1, 1, 1, 2, 3)) for _ in shape]
    starts = [rng.choice((0, 0, 1)) for _ in shape]
    sizes = [1 if wide else size for wide, size in zip(expanded, shape, strict=True)]
    stored = [start + step * size for start, step, size in zip(starts, steps, sizes, strict=True)]

    def view(tensor: Tensor) -> Tensor:
        tensor = tensor.permute([order.index(dim) for dim in range(4)])
        ends = zip(starts, steps, sizes, strict=True)
        return tensor[tuple(slice(start, start + step * size, step) for start, step, size in ends)].expand(shape)

    note = f"order {order} steps {steps} starts {starts} expanded {expanded}"
    return view, tuple(stored[dim] for dim in order), note


def draw_masks(rng: random.Random, batch: int, keys: int) -> Masks:
    """Draw padding, holes, documents and chosen global tokens."""
    masks = Masks()
    index = torch.arange(keys)
    if rng.random() < 0.5:
        rows = []
        for _ in range(batch):
            left, right = (rng.randint(0, keys) if rng.random() < 0.4 else 0 for _ in range(2))
            holes = torch.rand(keys) < rng.choice((0.0, 0.1, 0.5))
            rows.append((index >= left) & (index < keys - right) & ~holes)
        masks.key_mask = torch.stack(rows)
    if rng.random() < 0.3:
        share = rng.choice((0.02, 0.1, 0.5))
        masks.segment_ids = (torch.rand(batch, keys) < share).long().cumsum(1) % rng.choice((2, 1000))
    if rng.random() < 0.2:
        masks.global_mask = torch.rand(batch, keys) < rng.choice((0.0, 0.1, 0.5))
    return masks


def draw_whole_documents(rng: random.Random, batch: int, tokens: int) -> tuple[Masks, int]:
    """Draw documents of as many tokens each, with padding before and behind them, and how many keys there are."""
    most, gap = rng.randint(1, 3), rng.randint(0, 5)
    keys = most * (tokens + gap)
    key_mask, segment_ids = torch.zeros(batch, keys, dtype=torch.bool), torch.zeros(batch, keys, dtype=torch.long)
    for example in range(batch):
        for number in range(rng.randint(1, most)):
            first = number * (tokens + gap) + rng.randint(0, gap)
            segment_ids[example, number * (tokens + gap) :] = number
            # the first and the last token are none of the holes
            key_mask[example, first : first + tokens] = torch.rand(tokens) >= rng.choice((0.0, 0.2))
            key_mask[example, [first, first + tokens - 1]] = True
    return Masks(key_mask, segment_ids), keys


def add_query_masks(case: Case, rng: random.Random) -> None:
    """Draw the masks of queries of another sequence; none beside terms, whose distances documents would move."""
    batch, _, _, queries, keys, *_ = case.sizes
    case.query_masks = Masks()
    case.masks = Masks() if case.labels else draw_masks(rng, batch, keys)
    case.masks.global_mask = None
    if not case.labels:
        case.query_masks = draw_masks(rng, batch, queries + (case.offset or 0))
        case.query_masks.global_mask = None
    if case.masks.segment_ids is None or case.query_masks.segment_ids is None:
        case.masks.segment_ids = case.query_masks.segment_ids = None


def hash_ids(case: Case, rng: random.Random) -> None:
    """Make the ids of some cases' documents hashes, or the largest integer and the smallest: differences overflow."""
    factor = rng.choice((None, None, 1, 7046029254386353131))
    for masks in (case.masks, case.query_masks):
        if masks is not None and masks.segment_ids is not None and factor is not None:
            # the sum wraps around, too
            masks.segment_ids = torch.iinfo(torch.long).max + factor * masks.segment_ids


def add_terms(case: Case, rng: random.Random) -> None:
    """Draw learned terms, up to two."""
    batch, heads, _, queries, keys, *_ = case.sizes
    while len(case.labels) < 2 and rng.random() < 0.2:
        first = rng.randint(-6, 3)
        distance, span = (
            Distance(first, first + rng.randint(0, 8)),
            SoftSpan(rng.randint(1, 20), rng.choice((0, 0, 1)), 0),
        )
        label: Label = rng.choice((distance, span))
        name = f"term {len(case.labels)}"
        add_tensor(case, rng, name, (*(rng.choice((1, size)) for size in (batch, heads, queries)), label.num_values))
        if label.kind == "soft_span":
            # spans apart from whole numbers, where the mask has corners that no gradient is defined at
            whole = case.tensors[name].abs().mul(keys / 4).floor()
            case.tensors[name] = (whole + 0.25).clamp(max=200).to(case.dtype).double()
        case.labels.append(label)


def enlarge_scores(case: Case, rng: random.Random) -> None:
    """Multiply the scores by a drawn factor."""
    factor = rng.choice((30.0, 100.0, 300.0) if case.dtype == torch.float16 else (30.0, 300.0, 3000.0))
    case.tensors["q"] = (factor * case.tensors["q"]).to(case.dtype).double()
    case.notes.append(f"scores x {factor:g}")


def add_sinks(case: Case, rng: random.Random) -> None:
    """Draw sinks of these heads or of all heads of the model, some of them of no weight."""
    if rng.random() > 0.2:
        return
    num_sinks = case.num_model_heads if case.num_model_heads and rng.random() < 0.5 else case.sizes[1]
    view, stored, note = rng.choice(
        (
            (lambda sinks: sinks, (num_sinks,), ""),
            (lambda sinks: sinks[1::2], (2 * num_sinks,), "every second"),
            (lambda sinks: sinks.expand(num_sinks), (1,), "one for all"),
        )
    )
    drawn = rng.choice((1.0, 1.0, 30.0)) * torch.randn(stored)
    drawn[torch.rand(stored) < rng.choice((0.0, 0.0, 0.4, 1.0))] = -torch.inf
    case.tensors["sinks"], case.views["sinks"] = drawn.to(case.dtype).double(), view
    case.notes += [f"sinks: {note}"] if note else []
