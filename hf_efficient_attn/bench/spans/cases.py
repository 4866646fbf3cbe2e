"""The models that `bench spans` compares, and the two steps it times: training on a segment, and decoding a token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_efficient_attn.attention.cache_argument import CACHE_ARGUMENT
from hf_efficient_attn.bench.spans.profile import RAMP_TOKENS, profile
from hf_efficient_attn.errors import EfficientAttentionError
from hf_efficient_attn.models.adaptive_span.configuration_adaptive_span import AdaptiveSpanConfig
from hf_efficient_attn.models.adaptive_span.modeling_adaptive_span import AdaptiveSpanForCausalLM
from hf_efficient_attn.models.spans.bounds import all_bounds
from hf_efficient_attn.models.spans.cache import SpanCache
from hf_efficient_attn.models.spans.config import span_window
from hf_efficient_attn.models.spans.freezing import freeze_spans
from hf_efficient_attn.models.spans.memory import Segment
from hf_efficient_attn.models.spans.module import span_modules
from hf_efficient_attn.training.optimizer_groups import optimizer_groups

FIXED, ADAPTIVE, FROZEN, DYNAMIC, DENSE = "fixed", "adaptive", "frozen", "dynamic", "dense"
# ours, and the config's word for how far their heads read
SPANS = {FIXED: "fixed", ADAPTIVE: "adaptive", FROZEN: "adaptive", DYNAMIC: "dynamic"}
MODELS = (*SPANS, DENSE)
POSITIONS = ("relative_keys", "rope")
SEED = 0
VOCAB_SIZE = 205
# by how much the logit of a dynamic span varies from token to token, and the shortest span, as parts of the limit
DYNAMIC_SPREAD, SHORTEST_RATIO = 0.5, 1e-4
# largest difference of logits that rounding explains
TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}


@dataclass(frozen=True)
class Shape:
    """What the compared models have in common.

    Attributes:
        positions: of ours; the dense peer has rotary ones.
        limit: span limit, and how many tokens the dense peer reads.
        segment_tokens: tokens of a training step of ours; each reads as far as its spans, in the memory too.
    """

    positions: str
    limit: int
    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    segment_tokens: int
    batch_size: int
    attention_dropout: float
    dtype: str
    device: str

    @property
    def fields(self) -> dict[str, Any]:
        """The fields in which the configs of ours and of the dense peer agree."""
        return {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
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
    """Return one of `MODELS`; ours have the same weights, adaptive and frozen the same spans, dynamic around these."""
    torch.manual_seed(SEED)
    model: Any = build_dense(shape) if name == DENSE else AdaptiveSpanForCausalLM(shape.config(SPANS[name]))
    if name in (ADAPTIVE, FROZEN, DYNAMIC):
        set_spans(model, profile(shape.limit, shape.num_layers, shape.num_heads))
    if name == FROZEN:
        freeze_spans(model)
    return model.to(shape.device, getattr(torch, shape.dtype))  # type: ignore[no-any-return]


@torch.no_grad()
def set_spans(model: PreTrainedModel, layers: list[list[int]]) -> None:
    """Let the heads of a model read these numbers of tokens, ramp included; with dynamic spans, around these."""
    for spans, tokens in zip(span_modules(model), layers, strict=True):
        ratio = (torch.tensor(tokens) - spans.ramp).clamp(min=0) / spans.limit
        if spans.kind == DYNAMIC:
            spans.bias.copy_(ratio.clamp(SHORTEST_RATIO, 1 - SHORTEST_RATIO).logit())
            spans.weight.normal_(0.0, DYNAMIC_SPREAD * spans.weight.shape[1] ** -0.5)
        else:
            spans.ratio.copy_(ratio)


def kept_keys(model: PreTrainedModel, shape: Shape) -> float:
    """Return how many keys a head reads on average, ramp included: the mean of min(S, ⌈z⌉ + R) over all heads."""
    window = span_window(shape.config("fixed"))
    kept = [window.num_keys(float(span)) for spans in span_modules(model) for span in spans.head_spans()]
    return sum(kept) / len(kept) if kept else float(shape.limit)


def build_dense(shape: Shape) -> PreTrainedModel:
    """Return transformers' GPT-NeoX with SDPA: the same matrices, pre-norm, every token reads all before it."""
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

    Ours begin with a full memory, and every step goes on from the one before. Spans do not move.
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
    """Let every layer remember as many states as it keeps: of unit variance, as those that its norms give."""
    backbone: Any = model.base_model
    size = (len(segment), num_tokens, model.config.hidden_size)
    states = torch.randn(size, dtype=model.dtype, device=model.device)
    first = Segment(int(segment[0]), [None] * len(backbone.layers))
    for _ in backbone.layers:
        first.read(states)
    backbone.memory.close(first, backbone, all_bounds(backbone, span_modules(backbone)))


def build_training_step(name: str, shape: dict[str, Any]) -> Callable[[], None]:
    """Return the training step of a new model; arguments of JSON types, `shape` has the fields of `Shape`."""
    sizes = Shape(**shape)
    return training_step(name, build_model(name, sizes), sizes)


def full_cache(name: str, model: PreTrainedModel, shape: Shape, num_texts: int) -> Cache:
    """Return a cache of `num_texts` texts of `limit` random tokens, as far as it keeps them."""
    cache = DynamicCache(config=model.config) if name == DENSE else SpanCache(model)
    head_dim = shape.hidden_size // shape.num_heads
    for layer in range(shape.num_layers):
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
    """Read tokens of every text one by one, each after those in the cache."""
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
