"""Time, memory and state of every way to read a text, against its length.

Models of one layer, as wide as each other, which take turns; `--causal` takes those that read to their left, and
decodes behind the text as well: time for one more token, and memory of the cache. A training step is a forward and a
backward pass. Times are in milliseconds, memory is in MiB, lengths are in tokens:
    python model_cards/benchmarks/mechanisms.py --lengths 512 4096 32768 --mechanisms dense band linear --causal
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig

from hf_efficient_attn.bench.contest import MEASURES, Built, Contest, drawn_states, forward_case, training_case
from hf_efficient_attn.bench.timing import Case
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.integration.pattern_cache import PatternCache
from hf_efficient_attn.models.adaptive_span.configuration_adaptive_span import AdaptiveSpanConfig
from hf_efficient_attn.models.bp_transformer.configuration_bp_transformer import BPTransformerConfig
from hf_efficient_attn.models.compressed_transformer.configuration_compressed_transformer import (
    CompressedTransformerConfig,
)
from hf_efficient_attn.models.efficient_reformer.configuration_efficient_reformer import EfficientReformerConfig
from hf_efficient_attn.models.etc_transformer.configuration_etc_transformer import EtcTransformerConfig
from hf_efficient_attn.models.routing_transformer.configuration_routing_transformer import RoutingTransformerConfig
from hf_efficient_attn.models.simplified_transformer.configuration_simplified_transformer import (
    SimplifiedTransformerConfig,
)
from hf_efficient_attn.models.spans.memory import SpanCache
from hf_efficient_attn.models.sparse_seq2seq.configuration_sparse_seq2seq import SparseSeq2SeqConfig
from hf_efficient_attn.models.sparse_transformer.configuration_sparse_transformer import SparseTransformerConfig
from hf_efficient_attn.models.star_transformer.configuration_star_transformer import StarTransformerConfig
from hf_efficient_attn.patterns.bands import Band, BlockTopK
from hf_efficient_attn.patterns.big_bird import bigbird

DENSE = "dense"
DECODING = "decoding"
SEED = 0
# a small vocabulary: layers are measured, not a table of tokens
VOCAB_SIZE = 64
# positions that a model has beyond its text: for what is decoded
MOST_DECODED = 512
# settings with the longest text of what reads all pairs of tokens, and of what holds a score of each besides
DENSE_LIMIT, SCORES_LIMIT = "dense_limit", "scores_limit"
# of a block, for each key that a token reads: BigBird reads five to eight blocks, BlockTopK four
BLOCKS = 4


@dataclass(frozen=True)
class Shape:
    """What the compared models have in common.

    Attributes:
        keys: how many keys a token reads, about, where that can be chosen: window, landmarks, projected tokens, …
    """

    tokens: int
    batch_size: int
    hidden_size: int
    heads: int
    keys: int
    is_causal: bool
    dtype: str
    device: str
    layers: int = 1

    def states(self) -> Tensor:
        """Return embeddings [batch_size, tokens, hidden_size], always the same."""
        return drawn_states(self.batch_size, self.tokens, self.hidden_size, self.dtype, self.device)

    def band(self) -> Band:
        """Return the band of as many keys."""
        return Band(self.keys - 1, 0) if self.is_causal else Band(self.keys // 2, self.keys // 2)

    def block_tokens(self) -> int:
        """Return the tokens of a block of which a token reads several."""
        return max(1, self.keys // BLOCKS)


@dataclass(frozen=True)
class Mechanism:
    """One way to compute attention.

    Attributes:
        about: what it attends to; `{keys}` stands for their number.
        config: the class of its config.
        fields: returns what differs from the config's defaults.
        directions: those that it has, True: causal.
        cache: returns a cache that holds no more than what can still be read; None: that of the model itself.
        limit: the setting that says how long its texts are at most; None: any.
    """

    about: str
    config: type[PreTrainedConfig]
    fields: Callable[[Shape], dict[str, Any]] = lambda shape: {}
    directions: tuple[bool, ...] = (False, True)
    cache: Callable[[Any], Any] | None = None
    limit: str | None = None


def _pattern(about: str, pattern: Callable[[Shape], Any], **options: Any) -> Mechanism:
    return Mechanism(about, SparseTransformerConfig, lambda shape: {"attention_pattern": pattern(shape)}, **options)


def _compressed(
    about: str, mechanism: str, fields: Callable[[Shape], dict[str, Any]] = lambda shape: {}, **options: Any
) -> Mechanism:
    return Mechanism(
        about, CompressedTransformerConfig, lambda shape: {"mechanism": mechanism, **fields(shape)}, **options
    )


def _clusters(shape: Shape) -> dict[str, Any]:
    return {
        "num_routing_heads": shape.heads,
        "num_clusters": max(1, shape.tokens // shape.keys),
        "cluster_tokens": shape.keys,
        "position_embedding_type": "none",
    }


# by name, in the order of tables and pictures
MECHANISMS: dict[str, Mechanism] = {
    DENSE: _pattern("all tokens, by torch's SDPA", lambda shape: None, limit=DENSE_LIMIT),
    "sas_p": Mechanism(
        "all tokens, in a block without values, projection and skips", SimplifiedTransformerConfig, limit=DENSE_LIMIT
    ),
    "prior": _compressed("all tokens, with a learned prior by distance", "prior", limit=DENSE_LIMIT),
    "talking_heads": _compressed(
        "all tokens, by heads that mix scores and weights", "talking_heads", limit=SCORES_LIMIT
    ),
    "collaborative_heads": _compressed(
        "all tokens, by queries and keys that heads share", "collaborative_heads", limit=DENSE_LIMIT
    ),
    "band": _pattern("a window of {keys} keys", Shape.band, cache=lambda model: PatternCache(model.config)),
    "bigbird": _pattern(
        "blocks of {keys} / 4 keys around a token, a random one, and global ones",
        lambda shape: bigbird(shape.block_tokens(), num_random_blocks=1, causal=shape.is_causal),
    ),
    "block_top_k": _pattern(
        "the four blocks of {keys} / 4 keys that fit a token best",
        lambda shape: BlockTopK(shape.block_tokens(), BLOCKS),
        directions=(True,),
    ),
    "adaptive_span": Mechanism(
        "bands of learned widths, here of {keys} keys",
        AdaptiveSpanConfig,
        lambda shape: {
            "span_limit": shape.tokens,
            # of one side: causal heads have no other
            "span_init": min(1.0, shape.keys / shape.tokens) / (1 if shape.is_causal else 2),
            "position_embedding_type": "rope",
        },
        cache=SpanCache,
    ),
    "etc": Mechanism(
        "a window of {keys} keys, and a global token for each 32",
        EtcTransformerConfig,
        lambda shape: {"local_radius": shape.keys // 2},
        directions=(False,),
    ),
    "star": Mechanism("five keys, one of which has read the whole text", StarTransformerConfig, directions=(False,)),
    "tree": Mechanism("four nodes of each size of a tree of spans on each side", BPTransformerConfig),
    "reformer": Mechanism(
        "two chunks of {keys} / 2 tokens of its hash bucket, one round",
        EfficientReformerConfig,
        lambda shape: {
            "attn_layers": ["lsh"] * shape.layers,
            "num_hashes": 1,
            "lsh_attn_chunk_length": max(1, shape.keys // 2),
            "position_embedding_type": "none",
        },
    ),
    "routing": Mechanism("{keys} tokens of its cluster", RoutingTransformerConfig, _clusters),
    "linformer": _compressed(
        "{keys} projected tokens",
        "linformer",
        lambda shape: {"projected_tokens": min(shape.keys, shape.tokens)},
        directions=(False,),
    ),
    "nystrom": _compressed(
        "{keys} / 4 landmarks", "nystrom", lambda shape: {"num_landmarks": shape.block_tokens()}, directions=(False,)
    ),
    "memory_compressed": _compressed("one key for every three tokens", "memory_compressed"),
    "linear": _compressed("sums of elu(k) + 1", "linear"),
    "performer": _compressed(
        "sums of positive random features", "linear", lambda shape: {"feature_map": "positive_random"}
    ),
    "average": _compressed("the mean of all values", "linear", lambda shape: {"feature_map": "constant"}),
}
# what no layer has alone, since it reads with the scores, the weights or the output of others
LAYERED: dict[str, Mechanism] = {
    "residual_scores": _compressed("all tokens, by the scores of all layers so far", "residual_scores"),
    "reused_weights": _compressed(
        "all tokens, by the weights of the first layer",
        "reused_weights",
        lambda shape: {"mechanism": ["pattern"] + ["reused_weights"] * (shape.layers - 1)},
    ),
    "seq2seq": Mechanism(
        "all tokens, by an encoder and by a decoder that reads the text and its output",
        SparseSeq2SeqConfig,
        lambda shape: {
            "encoder_layers": shape.layers - shape.layers // 2,
            "decoder_layers": shape.layers // 2,
            "max_target_position_embeddings": shape.tokens,
        },
        directions=(False,),
    ),
}
ALL = MECHANISMS | LAYERED


def config_of(name: str, shape: Shape, **changes: Any) -> PreTrainedConfig:
    """Return the config of one of `ALL` in a shape, without dropout.

    changes: further fields, which come before those of the mechanism.
    """
    mechanism = ALL[name]
    known = {field.name for field in fields(mechanism.config)}
    common = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": 4 * shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.tokens + MOST_DECODED,
        "is_causal": shape.is_causal,
        **dict.fromkeys(("embedding_dropout", "hidden_dropout", "attention_dropout"), 0.0),
    }
    common = {key: value for key, value in common.items() if key in known}
    return mechanism.config(**{**common, **mechanism.fields(shape), **changes})


class Model(nn.Module):
    """A model of one layer, from embeddings to the last hidden state."""

    def __init__(self, model: Any, new_cache: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.model, self.new_cache = model, new_cache

    def forward(self, states: Tensor) -> Tensor:
        return self.model(inputs_embeds=states, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def loss(self, states: Tensor) -> Tensor:
        """Return a number that all outputs have a part in, with what layers add to a loss."""
        out = self.model(inputs_embeds=states, use_cache=False)
        loss, added = out.last_hidden_state.float().square().mean(), getattr(out, "auxiliary_loss", None)
        return loss if added is None else loss + added

    def decode(self, states: Tensor, cache: Any = None) -> Any:
        """Return the cache after it has read more tokens."""
        if cache is None and self.new_cache is not None:
            cache = self.new_cache(self.model)
        return self.model(inputs_embeds=states, use_cache=True, **{CACHE_ARGUMENT: cache})[CACHE_ARGUMENT]


def build_model(name: str, shape: Shape) -> Model:
    """Return a new model of one of `ALL` mechanisms."""
    torch.manual_seed(SEED)
    model = AutoModel.from_config(config_of(name, shape, vocab_size=VOCAB_SIZE))
    return Model(model, ALL[name].cache).to(shape.device, getattr(torch, shape.dtype))


def build(name: str, shape: Shape) -> Built:
    """Return a new model and what is timed of it; what is causal decodes one more token behind the text, too."""
    model, states = build_model(name, shape), shape.states()

    def step() -> None:
        model.loss(states).backward()
        model.zero_grad()

    cases = {"forward": forward_case(model, states), "training": training_case(model, step)}
    if not shape.is_causal:
        return Built(cases)
    with torch.no_grad():
        cache, token = model.eval().decode(states), states[:, :1]
    size = cache_bytes(cache)
    cases[DECODING] = Case(torch.no_grad()(lambda _: model.decode(token, cache)), model.eval)
    return Built(cases, {"cache_bytes": size})


def cache_bytes(cache: Any) -> int:
    """Return the bytes of all tensors that the layers of a cache hold, each memory once."""
    held = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for layer in cache.layers
        for value in vars(layer).values()
        if isinstance(value, Tensor)
    }
    return sum(held.values())


def check(settings: dict[str, Any]) -> None:
    """Raise InputError for a mechanism that has no such direction, or more rounds than tokens can be decoded."""
    is_causal = settings["is_causal"]
    able = [name for name, mechanism in MECHANISMS.items() if is_causal in mechanism.directions]
    missing = [name for name in settings["mechanisms"] if name not in able]
    if missing and len(settings["mechanisms"]) < len(MECHANISMS):
        raise InputError(
            f"--mechanisms {' '.join(missing)}: there is no {'causal' if is_causal else 'bidirectional'} form. Leave "
            f"it out, or take {'away' if is_causal else 'also'} --causal."
        )
    # by default all that have the direction
    settings["mechanisms"] = [name for name in settings["mechanisms"] if name in able]
    if settings["repeats"] >= MOST_DECODED:
        raise InputError(f"repeats={settings['repeats']}: at most {MOST_DECODED - 1} tokens are decoded behind a text.")


CONTEST = Contest(
    __file__,
    title="Ways to compute a layer: width {hidden_size}, {heads} heads, {dtype}, batch {batch_size}",
    kind="mechanism",
    contestants={name: mechanism.about for name, mechanism in MECHANISMS.items()},
    shape=Shape,
    build=build,
    lengths=(512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    memory_lengths=(2048, 16384),
    counts={
        "batch_size": (1, "texts"),
        "hidden_size": (512, "width"),
        "heads": (8, "heads"),
        "keys": (256, "keys that a token attends to, about, where that can be chosen"),
        DENSE_LIMIT: (16384, "longest text of what computes all pairs of tokens"),
        SCORES_LIMIT: (4096, "longest text of what holds a score of each pair"),
    },
    options={
        "--causal": {
            "action": "store_true",
            "dest": "is_causal",
            "help": "tokens attend to their left, and are decoded",
        }
    },
    limits={name: mechanism.limit for name, mechanism in MECHANISMS.items() if mechanism.limit},
    against=(DENSE,),
    measures={**MEASURES, DECODING: "one more token"},
    check=check,
    about="From embeddings to the last hidden state, without dropout, with an MLP four times as wide but for the star. "
    "Training step: forward and backward.",
)

if __name__ == "__main__":
    CONTEST.run(__doc__)
