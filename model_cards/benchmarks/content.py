"""Time and memory of keys chosen by content, compared with dense attention and transformers' Reformer.

One causal layer each, projections included, which take turns: `dense`, torch's SDPA; `projections`, only the linear
maps of the Reformers, their lower bound; `transformers_reformer`, the LSH attention in transformers; `reformer`, ours;
`routing`, heads that attend to their k-means cluster; `block_top_k`, the blocks of keys that fit a query best (MoBA);
`chosen_tokens`, keys that are given to every query (DSA), drawn at random from its past; `nearby_tokens`, given keys
just before the query and keys that it shares with its neighbours. A training step is a forward and a backward pass. The
memory of reversible and plain Reformer layers is also measured by their number. Times are in milliseconds, memory is in
MiB, lengths are in tokens:
    python model_cards/benchmarks/content.py --lengths 1024 4096 16384 --layers dense reformer
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch
from contest import Built, Contest, drawn_states, forward_case, training_case
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from hf_efficient_attn.attention.functional import attention
from hf_efficient_attn.bench.memory import peak_memory
from hf_efficient_attn.bench.report import MEBIBYTE, Row, markdown_table
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.listed_keys import ChosenTokens
from hf_efficient_attn.models.efficient_reformer.attention import LSHAttention
from hf_efficient_attn.models.efficient_reformer.configuration_efficient_reformer import EfficientReformerConfig
from hf_efficient_attn.models.efficient_reformer.modeling_efficient_reformer import MAX_STEP, ReformerLayer
from hf_efficient_attn.models.efficient_reformer.reversible import ReversibleStack, Streams
from hf_efficient_attn.models.routing_transformer.attention import RoutingAttention, RoutingInputs
from hf_efficient_attn.models.routing_transformer.clusters import update_all
from hf_efficient_attn.models.routing_transformer.configuration_routing_transformer import RoutingTransformerConfig
from hf_efficient_attn.patterns.bands import BlockTopK, Causal

DENSE, REFORMER, IN_TREE = "dense", "reformer", "transformers_reformer"
ROUTING, BLOCKS, TOKENS, NEARBY = "routing", "block_top_k", "chosen_tokens", "nearby_tokens"
PROJECTIONS = "projections"
REVERSIBLE, PLAIN = "reversible", "plain"
STACKS = (REVERSIBLE, PLAIN)
# width of the MLP divided by the width of the states
MLP_FACTOR = 4
SEED = 0
# for nearby_tokens: how many queries share tokens, and the divisor that gives the share of these among all tokens
SHARING_QUERIES, SHARED_PART = 64, 4
CHUNKS = (
    "{hashes} round(s) of hashing, chunks of {hash_chunk_tokens} tokens that attend to themselves and the one before, "
    "new rotations at every training step"
)


@dataclass(frozen=True)
class Shape:
    """What the compared layers have in common, and how many keys they choose.

    Attributes:
        hash_chunk_tokens: tokens of a chunk of the Reformers, which attend to their own chunk and the one before.
        cluster_tokens: most tokens of its cluster that a query attends to; there are tokens / cluster_tokens clusters.
        chosen_tokens: number of keys that are given to a query, drawn from its past.
    """

    tokens: int
    heads: int
    head_dim: int
    batch_size: int
    hashes: int
    hash_chunk_tokens: int
    cluster_tokens: int
    block_tokens: int
    chosen_blocks: int
    chosen_tokens: int
    dtype: str
    device: str

    @property
    def width(self) -> int:
        """Width of the states."""
        return self.heads * self.head_dim

    def states(self) -> Tensor:
        """Return the hidden states [batch_size, tokens, width], always the same."""
        return drawn_states(self.batch_size, self.tokens, self.width, self.dtype, self.device).requires_grad_()


class ProjectedAttention(nn.Module):
    """Attention with the usual projections: dense, or with keys chosen by given indices or by blocks."""

    def __init__(self, shape: Shape, attend: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.head_dim, self.attend = shape.head_dim, attend
        self.projections = nn.ModuleList(nn.Linear(shape.width, shape.width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        heads = (each(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in self.projections)
        return self.o_proj(self.attend(*heads).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Projections(nn.Module):
    """Only the linear maps of a Reformer's layer, whose keys are its queries; no attention takes less."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.qk_proj, self.v_proj, self.o_proj = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(3))

    def forward(self, states: Tensor) -> Tensor:
        return self.o_proj(self.qk_proj(states) + self.v_proj(states))  # type: ignore[no-any-return]


class Reformer(nn.Module):
    """LSH attention of our family. Training draws new rotations at every call, as the whole model does."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = LSHAttention(reformer_config(shape), 0)

    def forward(self, states: Tensor) -> Tensor:
        step = torch.randint(MAX_STEP, (), device=states.device) if self.training else None
        return self.attention(states, hash_step=step)[0]  # type: ignore[no-any-return]


class InTreeReformer(nn.Module):
    """LSH attention of transformers with the same number of buckets, and the output projection that follows it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        config = ReformerConfig(
            hidden_size=shape.width,
            num_attention_heads=shape.heads,
            attention_head_size=shape.head_dim,
            attn_layers=["lsh"],
            num_hashes=shape.hashes,
            # without it, transformers' model sets this field from the length of one text
            num_buckets=in_tree_buckets(shape),
            lsh_attn_chunk_length=shape.hash_chunk_tokens,
            lsh_attention_probs_dropout_prob=0.0,
            max_position_embeddings=shape.tokens,
            is_decoder=True,
        )
        self.attention = LSHSelfAttention(config, layer_idx=0)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.o_proj(self.attention(states).hidden_states)  # type: ignore[no-any-return]


class Routing(nn.Module):
    """Attention of a Routing Transformer in which all heads route. Training moves its centroids."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        config = RoutingTransformerConfig(
            hidden_size=shape.width,
            num_hidden_layers=1,
            num_attention_heads=shape.heads,
            num_routing_heads=shape.heads,
            num_clusters=max(1, shape.tokens // shape.cluster_tokens),
            cluster_tokens=shape.cluster_tokens,
            position_embedding_type="none",
            attention_dropout=0.0,
        )
        self.attention, self.commitment_weight = RoutingAttention(config, 0), config.commitment_weight
        self.attention.centroids.initialize()  # type: ignore[union-attr]
        self.register_buffer("documents", torch.zeros(1, shape.tokens, dtype=torch.long))
        self.register_buffer("positions", torch.arange(shape.tokens))
        self.loss: Tensor | None = None

    def forward(self, states: Tensor) -> Tensor:
        centroids: Any = self.attention.centroids
        means = centroids.means.clone() if self.training else None
        inputs = RoutingInputs(documents=self.documents, query_positions=self.positions)
        out, _, shown = self.attention(states, inputs, means=means)
        if shown:
            update_all([centroids], [shown])
            self.loss = self.commitment_weight * shown.distance
        return out  # type: ignore[no-any-return]


def reformer_config(shape: Shape, **fields: Any) -> EfficientReformerConfig:
    """Return the config of our Reformer in this shape, without dropout and positions."""
    return EfficientReformerConfig(
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        num_hashes=shape.hashes,
        lsh_attn_chunk_length=shape.hash_chunk_tokens,
        max_position_embeddings=shape.tokens,
        position_embedding_type="none",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        is_causal=True,
        **{"num_hidden_layers": 1, "attn_layers": ["lsh"], **fields},
    )


def in_tree_buckets(shape: Shape) -> int | list[int]:
    """Return the buckets of our Reformer as transformers' config takes them."""
    factors = reformer_config(shape).bucket_factors
    return list(factors) if len(factors) > 1 else prod(factors)


def dense(shape: Shape) -> nn.Module:
    """Causal attention to all keys by torch's SDPA."""
    return ProjectedAttention(shape, lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True))


def block_top_k(shape: Shape) -> nn.Module:
    """The blocks that fit a query best (MoBA)."""
    pattern = BlockTopK(shape.block_tokens, shape.chosen_blocks)
    return ProjectedAttention(shape, lambda q, k, v: attention(q, k, v, pattern))


def chosen_tokens(shape: Shape) -> nn.Module:
    """Tokens that are given to each query, the same for all heads (DSA); their choice is not timed."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.rand(shape.batch_size, 1, shape.tokens, min(shape.chosen_tokens, shape.tokens), generator=generator)
    chosen = ChosenTokens((drawn * torch.arange(1, shape.tokens + 1)[:, None]).long().to(shape.device))
    return ProjectedAttention(shape, lambda q, k, v: attention(q, k, v, Causal(), chosen=chosen))


def nearby_tokens(shape: Shape) -> nn.Module:
    """The last tokens before each query, and a fourth that it shares with its neighbours, as learned choices do."""
    generator = torch.Generator().manual_seed(SEED)
    count = min(shape.chosen_tokens, shape.tokens)
    position = torch.arange(shape.tokens)[:, None]
    first = position // SHARING_QUERIES * SHARING_QUERIES
    num_shared = count // SHARED_PART
    drawn = torch.rand(-(-shape.tokens // SHARING_QUERIES), num_shared, generator=generator)
    shared = (drawn.repeat_interleave(SHARING_QUERIES, 0)[: shape.tokens] * (first + 1)).long()
    # for the first queries, some of these positions are before the text and are no tokens
    recent = position - torch.arange(count - num_shared)
    chosen = ChosenTokens(torch.cat((recent, shared), 1).expand(shape.batch_size, 1, -1, -1).to(shape.device))
    return ProjectedAttention(shape, lambda q, k, v: attention(q, k, v, Causal(), chosen=chosen))


LAYERS: dict[str, Callable[[Shape], nn.Module]] = {
    DENSE: dense,
    PROJECTIONS: Projections,
    IN_TREE: InTreeReformer,
    REFORMER: Reformer,
    ROUTING: Routing,
    BLOCKS: block_top_k,
    TOKENS: chosen_tokens,
    NEARBY: nearby_tokens,
}


def build_layer(name: str, shape: Shape) -> nn.Module:
    """Return one of `LAYERS`, always with the same weights."""
    torch.manual_seed(SEED)
    return LAYERS[name](shape).to(shape.device, getattr(torch, shape.dtype))


def build(name: str, shape: Shape) -> Built:
    """Return a new layer with its timed cases: forward, and the gradients of the states and all weights."""
    layer, states = build_layer(name, shape), shape.states()
    gradient = torch.ones_like(states)

    def step() -> None:
        out = layer(states)
        loss = layer.loss if isinstance(layer, Routing) else None
        roots = ([out], [gradient]) if loss is None else ([out, loss], [gradient, torch.ones_like(loss)])
        torch.autograd.backward(*roots)
        layer.zero_grad()
        states.grad = None

    return Built({"forward": forward_case(layer, states), "training": training_case(layer, step)})


def build_stack_step(kind: str, num_layers: int, shape: dict[str, Any]) -> Callable[[], None]:
    """Return a function that computes the gradients of a stack of layers, reversible or not; arguments of JSON types.

    The gradients of the weights, which grow with the depth of any model, are allocated before, so that the step itself
    only needs memory for activations.
    """
    sizes = Shape(**shape)
    torch.manual_seed(SEED)
    fields = {"num_hidden_layers": num_layers, "intermediate_size": MLP_FACTOR * sizes.width}
    config = reformer_config(sizes, **fields)
    layers = nn.ModuleList(ReformerLayer(config, index) for index in range(num_layers))
    layers.to(sizes.device, getattr(torch, sizes.dtype)).train()
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    states = sizes.states()
    states.grad = torch.zeros_like(states)
    hash_step = torch.zeros((), dtype=torch.long, device=states.device)

    def step() -> None:
        stack = ReversibleStack() if kind == REVERSIBLE else None
        first = second = states.to(torch.promote_types(states.dtype, torch.float32))
        for layer in layers:
            first, second = layer(first, Streams(first, second), stack=stack, hash_step=hash_step)
        if stack is not None:
            stack.close(first, second)
        (first + second).sum().backward()

    return step


def check(settings: dict[str, Any]) -> None:
    """Raise InputError if transformers' Reformer cannot split a length into chunks."""
    chunk = settings["hash_chunk_tokens"]
    wrong = [tokens for tokens in settings["lengths"] if tokens % chunk]
    if IN_TREE in settings["layers"] and wrong:
        raise InputError(
            f"{IN_TREE} needs a multiple of hash_chunk_tokens={chunk} tokens, not {wrong[0]}. Give such lengths, or "
            "leave it out of --layers."
        )


def measure_depth(results: dict[str, Any]) -> None:
    """Add "depth": peak bytes of a training step beyond weights and their gradients, by number of layers and stack."""
    settings, device = results["settings"], results["machine"]["device"]
    shape = asdict(CONTEST.shape_of(None, settings["depth_tokens"], settings, torch.device(device)))
    rows: list[Row] = [{"layers": count, "stack": kind} for count in settings["depths"] for kind in STACKS]
    for row in rows:
        arguments = {"kind": row["stack"], "num_layers": row["layers"], "shape": shape}
        row["peak_memory_bytes"] = peak_memory(build_stack_step, arguments, torch.device(device))
    results["depth"] = rows


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the contest, and the table of memory by depth."""
    settings, depth = results["settings"], results["depth"]
    found = replace(CONTEST, tables=None).sections(results)
    if depth:
        lines = [[kind, *(f"{row['peak_memory_bytes'] / MEBIBYTE:,.0f}" for row in depth if row["stack"] == kind)]
                 for kind in STACKS]  # fmt: skip
        header = ["stack", *(f"{count} layers" for count in settings["depths"])]
        found[f"Peak MiB of {settings['depth_tokens']:,} tokens against depth"] = markdown_table(header, lines)
    return found


CONTEST = Contest(
    __file__,
    title="Keys chosen by content: one causal layer of {heads} heads of {head_dim}, {dtype}, batch {batch_size}",
    kind="layer",
    contestants={
        DENSE: "torch's SDPA",
        PROJECTIONS: "the three linear maps of a Reformer's layer alone",
        IN_TREE: f"LSHSelfAttention of transformers, {CHUNKS}",
        REFORMER: f"ours, {CHUNKS}",
        ROUTING: "all heads route: a query attends to the last {cluster_tokens} tokens of its cluster, of which "
        "there is one for as many tokens; training moves the centroids",
        BLOCKS: "the {chosen_blocks} blocks of {block_tokens} keys that fit a query best",
        TOKENS: "{chosen_tokens} tokens of its past for every query, drawn at random; their choice is not timed",
        NEARBY: f"as many, the last ones but 1 / {SHARED_PART} that {SHARING_QUERIES} neighbours share",
    },
    shape=Shape,
    build=build,
    lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
    memory_lengths=(4096, 16384, 65536),
    counts={
        "heads": (8, "heads"),
        "head_dim": (64, "width of a head"),
        "batch_size": (1, "texts"),
        "hashes": (1, "rounds of hashing of the Reformers"),
        "hash_chunk_tokens": (64, "tokens of a chunk of the Reformers; lengths are multiples of it"),
        "cluster_tokens": (256, "tokens of its cluster that a routing head attends to at most"),
        "block_tokens": (512, "tokens of a block of block_top_k"),
        "chosen_blocks": (3, "blocks that a query of block_top_k attends to"),
        "chosen_tokens": (256, "keys of a query of chosen_tokens and nearby_tokens"),
        "dense_limit": (16384, "longest text of dense attention"),
        "peer_limit": (16384, "longest text of transformers' Reformer"),
        "tokens_limit": (16384, "longest text of chosen_tokens and nearby_tokens"),
        "depth_tokens": (4096, "tokens of the text of the stacks of layers"),
    },
    options={
        "--depths": {
            "nargs": "*",
            "type": int,
            "default": [2, 4, 8, 12],
            "metavar": "N",
            "help": "numbers of layers whose memory is measured (default 2 4 8 12)",
        }
    },  # fmt: skip
    quick={"depths": []},
    limits={DENSE: "dense_limit", IN_TREE: "peer_limit", TOKENS: "tokens_limit", NEARBY: "tokens_limit"},
    against=(DENSE, IN_TREE),
    check=check,
    finish=measure_depth,
    tables=tables,
    about="With projections; training step: forward and backward. Depth: Reformer layers with an MLP "
    f"{MLP_FACTOR} times as wide; gradients of the weights lie in memory before.",
    beyond="weights and states",
)

if __name__ == "__main__":
    CONTEST.run(__doc__)
