"""Time and memory of learned attention spans, compared with all heads at the limit and with dense attention.

The authors' small network, with the spans of a trained one, in five forms: `fixed`, all heads attend to the whole
limit; `adaptive`; `frozen`, the same spans as constants; `dynamic`, where each token has its own span, around these;
`dense`, GPT-NeoX with torch's SDPA. All models with the same span limit take turns. A training step is forward, loss,
backward and AdamW on a segment of 512 tokens after a full memory; a decode step is one token of one text, or of each of
several texts, after a full cache. Times are in milliseconds, memory is in MiB, span limits are in tokens:
    python model_cards/benchmarks/spans.py --limits 1024 4096 --positions rope
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from contest import Built, Contest, training_case
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_efficient_attn.bench.report import MEBIBYTE, NONE, Line, Panel, Row, markdown_table
from hf_efficient_attn.bench.timing import Case, summarize
from hf_efficient_attn.errors import EfficientAttentionError, InputError
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.models.adaptive_span.configuration_adaptive_span import AdaptiveSpanConfig
from hf_efficient_attn.models.adaptive_span.modeling_adaptive_span import AdaptiveSpanForCausalLM
from hf_efficient_attn.models.spans.config import span_window
from hf_efficient_attn.models.spans.memory import Segment, SpanCache
from hf_efficient_attn.models.spans.module import all_bounds, span_modules
from hf_efficient_attn.models.spans.training import average_span, freeze_spans, span_flops
from hf_efficient_attn.training.optimizer_groups import optimizer_groups

# How far the heads attend, as in a trained model of the paper, in which few heads are long: Sukhbaatar et al.,
# "Adaptive Attention Span in Transformers" (arXiv:1905.07799), figure 4: 12 layers, 8 heads, span limit 4,096. The
# longest head of each layer is read off that figure, to about 10%; the figure also shows that few of the others are
# long. With a second long head of 0.3 of the first, and the rest at the ramp, heads attend to 312 tokens on average at
# a limit of 8,192; the paper states 314.
RAMP_TOKENS = 32
# the span limit of the model in the figure
SEEN_LIMIT = 4096
# tokens that the longest head of each layer attends to there, ramp included
LONGEST = (32, 32, 32, 32, 32, 100, 220, 1100, 3200, 230, 3900, 1700)
SECOND_SHARE = 0.3

FIXED, ADAPTIVE, FROZEN, DYNAMIC, DENSE = "fixed", "adaptive", "frozen", "dynamic", "dense"
# our models, and `span` in their configs
SPANS = {FIXED: "fixed", ADAPTIVE: "adaptive", FROZEN: "adaptive", DYNAMIC: "dynamic"}
MODELS = (*SPANS, DENSE)
POSITIONS = ("relative_keys", "rope")
SEED = 0
VOCAB_SIZE = 205
# by how much the logit of a dynamic span varies from token to token, and the shortest span, as parts of the limit
DYNAMIC_SPREAD, SHORTEST_RATIO = 0.5, 1e-4
TRAINING, DECODE = "training", "decode_"
# pairs of models; the time of the first is divided by the time of the second
RATIOS = (
    (ADAPTIVE, FIXED),
    (FROZEN, FIXED),
    (DYNAMIC, ADAPTIVE),
    (DYNAMIC, FIXED),
    (ADAPTIVE, DENSE),
    (FIXED, DENSE),
)
LINES = {"relative_keys": "-", "rope": "--"}
COLORS = {FIXED: "#ee8866", ADAPTIVE: "#4477aa", FROZEN: "#44bb99", DYNAMIC: "#aa3377", DENSE: "#333333"}
# largest difference of logits that rounding explains
TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}


def profile(limit: int, num_layers: int, num_heads: int) -> list[list[int]]:
    """Return how many tokens each head of each layer attends to, ramp included, in proportion to the span limit.

    If there are fewer layers than in the figure, they are picked evenly from all of its depth.

    >>> profile(2048, 12, 4)[8:10]
    [[1600, 32, 480, 32], [32, 115, 32, 34]]
    >>> [max(layer) for layer in profile(4096, 4, 2)]
    [32, 32, 1100, 3900]
    """
    layers = []
    for index in range(num_layers):
        longest = LONGEST[(2 * index + 1) * len(LONGEST) // (2 * num_layers)] * limit / SEEN_LIMIT
        tokens = [0.0] * num_heads
        # long heads have any place in a layer, as after training
        tokens[(index + num_heads // 2) % num_heads] = SECOND_SHARE * longest
        tokens[index % num_heads] = longest
        layers.append([min(limit, max(RAMP_TOKENS, int(each))) for each in tokens])
    return layers


def average(layers: list[list[int]]) -> float:
    """Return how many tokens a head attends to on average.

    >>> round(average(profile(8192, 12, 8)))
    312
    """
    return sum(map(sum, layers)) / sum(map(len, layers))


@dataclass(frozen=True)
class Shape:
    """What the compared models have in common.

    Attributes:
        positions: positions of our models; the dense model has rotary positions.
        limit: span limit, and the length in tokens of a text of the dense model.
        segment_tokens: tokens of a training step of our models; each attends as far as its span, also in the memory.
    """

    positions: str
    limit: int
    layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    segment_tokens: int
    batch_size: int
    decode_tokens: int
    decode_batch_sizes: list[int]
    attention_dropout: float
    dtype: str
    device: str

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that are the same in the configs of our models and of the dense model."""
        return {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.num_heads,
            "intermediate_size": self.intermediate_size,
            "attention_dropout": self.attention_dropout,
        }

    def config(self, span: str) -> AdaptiveSpanConfig:
        """Return the authors' network for enwik8 in this shape."""
        return AdaptiveSpanConfig.enwik8_small(
            span=span,
            span_limit=self.limit,
            span_ramp=RAMP_TOKENS,
            position_embedding_type=self.positions,
            activation_dropout=0.0,
            **self.fields,
        )


def build_model(name: str, shape: Shape) -> PreTrainedModel:
    """Return one of `MODELS`; ours have the same weights, adaptive and frozen the same spans, dynamic similar ones."""
    torch.manual_seed(SEED)
    model: Any = build_dense(shape) if name == DENSE else AdaptiveSpanForCausalLM(shape.config(SPANS[name]))
    if name in (ADAPTIVE, FROZEN, DYNAMIC):
        set_spans(model, profile(shape.limit, shape.layers, shape.num_heads))
    if name == FROZEN:
        freeze_spans(model)
    return model.to(shape.device, getattr(torch, shape.dtype))  # type: ignore[no-any-return]


@torch.no_grad()
def set_spans(model: PreTrainedModel, layers: list[list[int]]) -> None:
    """Let the heads attend to these numbers of tokens, ramp included; with dynamic spans, to about these numbers."""
    for spans, tokens in zip(span_modules(model), layers, strict=True):
        ratio = (torch.tensor(tokens) - spans.ramp).clamp(min=0) / spans.limit
        if spans.kind == DYNAMIC:
            spans.bias.copy_(ratio.clamp(SHORTEST_RATIO, 1 - SHORTEST_RATIO).logit())
            spans.weight.normal_(0.0, DYNAMIC_SPREAD * spans.weight.shape[1] ** -0.5)
        else:
            spans.ratio.copy_(ratio)


def kept_keys(model: PreTrainedModel, shape: Shape) -> float:
    """Return how many keys a head keeps on average, ramp included: the mean of min(S, ⌈z⌉ + R) over all heads."""
    window = span_window(shape.config("fixed"))
    kept = [window.num_keys(float(span)) for spans in span_modules(model) for span in spans.head_spans()]
    return sum(kept) / len(kept) if kept else float(shape.limit)


def build_dense(shape: Shape) -> PreTrainedModel:
    """Return transformers' GPT-NeoX with SDPA: the same matrices, pre-norm, each token attends to all before it."""
    config = AutoConfig.for_model(
        "gpt_neox",
        **shape.fields,
        hidden_act="relu",
        rotary_pct=1.0,
        use_parallel_residual=False,
        max_position_embeddings=2 * shape.limit,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")  # type: ignore[no-any-return]


def training_tokens(name: str, shape: Shape) -> int:
    """Return the tokens of one training step of an example.

    Ours train on a segment after a memory as long as the spans reach, the dense model on a text as long as the limit.
    """
    return shape.limit if name == DENSE else shape.segment_tokens


def training_step(name: str, model: PreTrainedModel, shape: Shape) -> Callable[[], None]:
    """Return a function that trains for one step: forward, loss, backward, AdamW, gradients freed.

    Ours start with a full memory, and every step continues the one before. Spans do not change.
    """
    model.train()
    has_spans = any(spans.kind in (ADAPTIVE, DYNAMIC) for spans in span_modules(model))
    groups = optimizer_groups(model, weight_decay=0.01, span_lr=0.0 if has_spans else None)
    optimizer = torch.optim.AdamW(groups, lr=1e-6, fused=True)
    tokens = random_tokens(shape.batch_size, training_tokens(name, shape), model.device)
    segment = torch.zeros(shape.batch_size, dtype=torch.int64, device=model.device)
    if name != DENSE:
        fill_memory(model, segment, shape.limit)

    def step() -> None:
        inputs = {} if name == DENSE else {"segment_index": segment.add_(1)}
        model(input_ids=tokens, labels=tokens, use_cache=False, **inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fill_memory(model: PreTrainedModel, segment: Tensor, num_tokens: int) -> None:
    """Fill the memory of every layer with random states of unit variance, like the outputs of norms."""
    backbone: Any = model.base_model
    size = (len(segment), num_tokens, model.config.hidden_size)
    states = torch.randn(size, dtype=model.dtype, device=model.device)
    first = Segment(int(segment[0]), [None] * len(backbone.layers))
    for _ in backbone.layers:
        first.read(states)
    backbone.memory.close(first, backbone, all_bounds(backbone, span_modules(backbone)))


def full_cache(name: str, model: PreTrainedModel, shape: Shape, num_texts: int) -> Cache:
    """Return a cache of `num_texts` texts of `limit` random tokens; a cache of spans keeps only the last ones."""
    cache = DynamicCache(config=model.config) if name == DENSE else SpanCache(model)
    head_dim = shape.hidden_size // shape.num_heads
    for layer in range(shape.layers):
        keys = torch.randn(num_texts, shape.num_heads, shape.limit, head_dim, dtype=model.dtype, device=model.device)
        cache.update(keys, keys.clone(), layer)
    return cache


def shorten(cache: Cache, num_tokens: int) -> None:
    """Remove the tokens after the first `num_tokens` from a cache; a cache of spans never holds more."""
    layers: Any = cache.layers
    for layer in layers:
        if layer.keys.shape[2] > num_tokens:
            layer.keys, layer.values = layer.keys[:, :, :num_tokens], layer.values[:, :, :num_tokens]


def cache_bytes(cache: Cache) -> int:
    """Return the bytes of the keys and values of a cache, with the room for new ones."""
    layers: Any = cache.layers
    return sum(each.untyped_storage().nbytes() for layer in layers for each in (layer.keys, layer.values))


@torch.no_grad()
def decode(model: PreTrainedModel, cache: Cache, num_tokens: int, num_texts: int) -> None:
    """Decode tokens of every text one by one, each after those in the cache."""
    token = random_tokens(num_texts, 1, model.device)
    for _ in range(num_tokens):
        model(input_ids=token, use_cache=True, **{CACHE_ARGUMENT: cache})


def random_tokens(batch_size: int, num_tokens: int, device: torch.device) -> Tensor:
    """Return tokens [batch_size, num_tokens], always the same."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(VOCAB_SIZE, (batch_size, num_tokens), generator=generator).to(device)


@torch.no_grad()
def check_frozen(adaptive: PreTrainedModel, frozen: PreTrainedModel, shape: Shape) -> float:
    """Return the largest difference between the logits of the two for one segment, in evaluation mode.

    Raises:
        EfficientAttentionError: a difference larger than rounding explains.
    """
    tokens = random_tokens(shape.batch_size, shape.segment_tokens, adaptive.device)
    logits = [model.eval()(input_ids=tokens, use_cache=False).logits.float() for model in (adaptive, frozen)]
    difference = float((logits[0] - logits[1]).abs().max())
    if not difference <= TOLERANCES[shape.dtype]:
        raise EfficientAttentionError(
            f"The adaptive model and its frozen form differ by {difference:.1e} at a span limit of {shape.limit:,} "
            f"tokens, more than rounding ({TOLERANCES[shape.dtype]:.0e}). Report this."
        )
    return difference


def build(name: str, shape: Shape) -> Built:
    """Return a new model with its timed cases and its cost according to the formula.

    Training is timed per 1,000 tokens, decoding per step.
    """
    model = build_model(name, shape)
    kept = kept_keys(model, shape)
    is_checked = name == FROZEN
    facts = {
        "kept_keys": kept,
        "average_span": None if name == DENSE else average_span(model),
        "flops_per_token": span_flops(shape.config("fixed"), kept),
        "training_tokens": training_tokens(name, shape),
        "difference": check_frozen(build_model(ADAPTIVE, shape), model, shape) if is_checked else None,
    }
    cases, units = {}, {TRAINING: facts["training_tokens"] * shape.batch_size / 1000}
    for num_texts in shape.decode_batch_sizes:
        cache = full_cache(name, model, shape, num_texts)
        # the first new token allocates room for more of them, which `cache_bytes` includes
        decode(model.eval(), cache, 1, num_texts)
        facts.setdefault("cache_bytes", cache_bytes(cache) // num_texts)
        cases[f"{DECODE}{num_texts}"] = decode_case(model, cache, num_texts, shape)
        units[f"{DECODE}{num_texts}"] = shape.decode_tokens
    step = training_step(name, model, shape)
    return Built({TRAINING: training_case(model, step), **cases}, facts, units)


def decode_case(model: PreTrainedModel, cache: Cache, num_texts: int, shape: Shape) -> Case:
    """Return the case of decoding tokens one by one after a full cache."""

    def prepare() -> None:
        model.eval()
        shorten(cache, shape.limit)

    return Case(lambda _: decode(model, cache, shape.decode_tokens, num_texts), prepare)


def title_of(measure: str) -> str:
    """Return what a measure is called in tables.

    >>> title_of("training"), title_of("decode_1"), title_of("decode_8")
    ('training step', 'decode step of 1 text', 'decode step of 8 texts')
    """
    if measure == TRAINING:
        return "training step"
    num_texts = int(measure.removeprefix(DECODE))
    return f"decode step of {num_texts} text{'s' if num_texts > 1 else ''}"


def check(settings: dict[str, Any]) -> None:
    """Raise InputError for fewer texts than one, or a dropout out of range."""
    if min(settings["decode_batch_sizes"]) < 1:
        raise InputError(f"decode_batch_sizes={min(settings['decode_batch_sizes'])} must be at least 1.")
    if not 0.0 <= settings["attention_dropout"] < 1.0:
        raise InputError(f"attention_dropout={settings['attention_dropout']} must be at least 0 and below 1.")


def measures_of(settings: dict[str, Any]) -> list[str]:
    """Return the measures: training, and decoding for each number of texts."""
    return [TRAINING, *(f"{DECODE}{num_texts}" for num_texts in settings["decode_batch_sizes"])]


def finish(results: dict[str, Any]) -> None:
    """Gather the measures of a row as "times", and add its time and cost divided by those of other models.

    These are "time_over", {other model: {measure: quartiles}}, and "flops_over", {other model: ratio}; below 1 = this
    model is cheaper than the other. Rounds are compared one by one.
    """
    rows, measures = results["results"], measures_of(results["settings"])
    for row in rows:
        row["times"] = {measure: row.pop(measure) for measure in measures}
        row.pop("forward", None)
    found = {(row["positions"], row["limit"], row["model"]): row for row in rows}
    for row in rows:
        pairs = [other for own, other in RATIOS if own == row["model"]]
        others = {name: found.get((row["positions"], row["limit"], name)) for name in pairs}
        others = {name: other for name, other in others.items() if other is not None}
        row["time_over"] = {name: _time_over(row, other) for name, other in others.items()}
        row["flops_over"] = {name: row["flops_per_token"] / other["flops_per_token"] for name, other in others.items()}


def _time_over(row: Row, other: Row) -> dict[str, dict[str, float]]:
    return {
        measure: summarize([a / b for a, b in zip(times["samples"], other["times"][measure]["samples"], strict=True)])
        for measure, times in row["times"].items()
    }


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by their headings."""
    settings, rows = results["settings"], results["results"]
    table = partial(CONTEST.table, rows, settings)
    found = {f"Time ratios, {title_of(each)}": _ratio_table(rows, settings, each) for each in measures_of(settings)}
    for measure in measures_of(settings):
        unit = "milliseconds per 1,000 tokens" if measure == TRAINING else "milliseconds"
        found[f"{title_of(measure).capitalize()}, {unit}"] = table(partial(_median, measure))
    found["Million multiply-adds of a token"] = table(lambda row: f"{row['flops_per_token'] / 1e6:.1f}")
    found["Keys that a head attends to on average"] = table(lambda row: f"{row['kept_keys']:,.0f}")
    found["MiB of the cache, an example"] = table(lambda row: f"{row['cache_bytes'] / MEBIBYTE:,.1f}")
    if any(row["peak_memory_bytes"] for row in rows):
        found["Peak MiB of a training step beyond weights and memory"] = table(
            lambda row: NONE if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / MEBIBYTE:,.0f}"
        )
    return found


def _median(measure: str, row: Row) -> str:
    return f"{row['times'][measure]['milliseconds']['median']:,.{0 if measure == TRAINING else 1}f}"


def _ratio_table(rows: list[Row], settings: dict[str, Any], measure: str) -> str:
    lines = []
    for positions in settings["positions"]:
        for own, other in RATIOS:
            found = [row for row in rows if (row["positions"], row["model"]) == (positions, own)]
            if found and other in settings["models"]:
                cells = (_ratio(row["time_over"][other][measure], row["flops_over"][other]) for row in found)
                lines.append([f"{own} / {other}, {positions}", *cells])
    return markdown_table(["models", *(f"S = {limit:,}" for limit in settings["limits"])], lines)


def _ratio(time: dict[str, float], flops: float) -> str:
    quartiles = f"{time['first_quartile']:.2f}–{time['third_quartile']:.2f}"
    return f"{time['median']:.2f} ({quartiles}), multiply-adds {flops:.2f}"


def panels(results: dict[str, Any]) -> list[Panel]:
    """Return the panels: a training step, decode steps, and peak memory, against the span limit."""
    settings, rows = results["settings"], results["results"]

    def lines(value: Callable[[Row], float | None]) -> list[Line]:
        found = []
        for positions in settings["positions"]:
            for name in settings["models"]:
                own = [row for row in rows if (row["positions"], row["model"]) == (positions, name)]
                points = [(row["limit"], number) for row in own if (number := value(row)) is not None]
                style = {"color": COLORS[name], "linestyle": LINES[positions], "marker": "o"}
                found.append(Line(f"{name}, {positions}", points, style))
        return found

    def median(row: Row, measure: str) -> float:
        return row["times"][measure]["milliseconds"]["median"]  # type: ignore[no-any-return]

    def peak(row: Row) -> float | None:
        return None if row["peak_memory_bytes"] is None else row["peak_memory_bytes"] / MEBIBYTE

    drawn = [
        Panel(title_of(measure).capitalize(), "milliseconds", lines(partial(median, measure=measure)))
        for measure in measures_of(settings)
    ]
    return [*drawn, Panel("Peak memory of a training step", "MiB beyond weights and memory", lines(peak))]


CONTEST = Contest(
    __file__,
    title="Attention spans: {layers} layers, width {hidden_size}, {num_heads} heads, MLP {intermediate_size}, {dtype}, "
    "batch {batch_size}, attention dropout {attention_dropout:g}",
    kind="model",
    contestants={
        FIXED: "every head attends to S keys",
        ADAPTIVE: "the authors' network with the spans of figure 4 of arXiv:1905.07799, in proportion to S (longest "
        "head of each layer as there, a second of 0.3 of it, the others at the ramp of 32)",
        FROZEN: "the same after freeze_spans",
        DYNAMIC: "each token has its own span, around these",
        DENSE: "GPT-NeoX of transformers in the same shape with rotary positions and SDPA; it trains on texts of S "
        "tokens, of which each attends to all before it, S / 2 on average, and decodes with S of them cached",
    },
    shape=Shape,
    build=build,
    lengths=(1024, 2048, 4096, 8192),
    memory_lengths=(1024, 2048, 4096, 8192),
    counts={
        "layers": (12, "layers; fewer are picked from all depths of the profile"),
        "hidden_size": (512, "width of the models"),
        "num_heads": (8, "attention heads"),
        "intermediate_size": (2048, "width of the MLP"),
        "segment_tokens": (512, "tokens that our models read in a training step"),
        "decode_tokens": (8, "tokens that are decoded for one sample of the time"),
        "batch_size": (1, "examples per training step"),
    },
    options={
        "--positions": {
            "nargs": "+",
            "choices": POSITIONS,
            "default": list(POSITIONS),
            "help": "positions of our models (default both)",
        },
        "--decode-batch-sizes": {
            "nargs": "+",
            "type": int,
            "default": [1, 8],
            "metavar": "N",
            "help": "texts that are decoded side by side (default 1 8)",
        },
        "--attention-dropout": {
            "type": float,
            "default": 0.0,
            "metavar": "P",
            "help": "attention dropout of all models (default 0)",
        },
    },  # fmt: skip
    quick={"positions": ["rope"], "decode_batch_sizes": [1]},
    group="positions",
    check=check,
    finish=finish,
    tables=tables,
    panels=panels,
    about="Time ratios: below 1 = the first is faster. Training step: one segment of {segment_tokens} tokens after a "
    "full memory, forward, mean loss, backward, AdamW (fused). Multiply-adds: L(4d² + 2·d·d_ff + 2·span·d) a token, "
    "with the mean over all heads of the keys kept, min(S, ⌈z⌉ + R), as span; projections of the memory and products "
    "with position vectors are not in it.",
    length="limit",
    axis="span limit, tokens",
    beyond="weights and memory",
    max_seconds=60,
)

if __name__ == "__main__":
    CONTEST.run(__doc__)
