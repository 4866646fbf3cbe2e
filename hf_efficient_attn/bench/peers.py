"""The peers of `bench attention`: other code that computes the same patterns, each on inputs in its own layout.

Every peer gets projected queries, keys and values, as our attention does; only attention is timed. The in-tree layers
of Longformer and BigBird are measured without their projections. A peer is a function that takes a problem and returns
its call, or a sentence that says why there is none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import BigBirdConfig, LongformerConfig
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import flex_attention_mask
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from hf_efficient_attn.bench.cases import (
    BLOCK_TOKENS,
    DILATION,
    NUM_RANDOM_BLOCKS,
    SIDE_TOKENS,
    Call,
    pattern_of,
    scattered,
)
from hf_efficient_attn.layout.dense_mask import additive_mask
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import TokenMask

# tokens before and after a query, for the presets that are bands
SIDES = {"band": (SIDE_TOKENS, SIDE_TOKENS), "causal_band": (2 * SIDE_TOKENS, 0)}


@dataclass(frozen=True)
class Problem:
    """A pattern by name, and q, k, v [batch, heads, tokens, head_dim]."""

    name: str
    inputs: list[Tensor]

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return self.inputs[0].shape[2]

    @property
    def layout(self) -> Layout:
        """The layout of the pattern for the length and heads of the inputs."""
        return Layout(pattern_of(self.name, self.tokens), self.inputs[0].shape[1], self.tokens, self.tokens)

    def moved(self) -> list[Tensor]:
        """Return q, k, v as [batch, tokens, heads, head_dim], each with requires_grad."""
        return [tensor.detach().transpose(1, 2).contiguous().requires_grad_() for tensor in self.inputs]


def masked(problem: Problem) -> Call:
    """torch's SDPA with the pattern as a precomputed mask."""
    q = problem.inputs[0]
    mask, _ = additive_mask(problem.layout, TokenMask(), len(q), q.device, q.dtype)
    return Call(lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), problem.inputs)


def transformers_flex(problem: Problem, is_mask_timed: bool = True) -> Call:
    """transformers' flex path, which makes its mask in every call, as a model does once per forward pass.

    Its masks are the same for all heads: if a pattern differs by head, the pattern of the first head is used. On a CPU
    every length is compiled separately, because torch 2.13 cannot compile all of these masks for any length there.
    """
    q = problem.inputs[0]
    pattern = problem.layout.head_groups()[0][2]
    # the pattern must compute what it caches before it is traced
    pattern.allowed(0, 0)
    pattern = pattern.with_tables(lambda table: torch.tensor(table, device=q.device))
    module = nn.Module().eval()
    is_cpu = q.device.type == "cpu"

    def allowed(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return pattern.allowed(query, key)  # type: ignore[no-any-return]

    def make_mask() -> Any:
        size = (len(q), problem.tokens, problem.tokens)
        return flex_attention_mask(*size, mask_function=allowed, device=q.device)

    with torch._dynamo.config.patch(automatic_dynamic_shapes=not is_cpu):
        made = None if is_mask_timed else make_mask()

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch._dynamo.config.patch(automatic_dynamic_shapes=not is_cpu):
            mask = make_mask() if made is None else made
            return flex_attention_forward(module, q, k, v, mask, scaling=q.shape[3] ** -0.5)[0]  # type: ignore[no-any-return]

    # after one failed backward pass torch silently runs the same function unfused
    no_backward = "flex has no backward pass on cpu." if is_cpu else None
    return Call(forward, problem.inputs, no_backward)


def transformers_flex_kernel(problem: Problem) -> Call:
    """transformers' flex path with a precomputed mask."""
    return transformers_flex(problem, is_mask_timed=False)


class Handed(nn.Module):
    """Replaces a projection of a layer, and returns a given tensor."""

    given: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return a copy, because the layer changes it in place."""
        return self.given.clone()


def longformer_layer(problem: Problem) -> Call | str:
    """The in-tree Longformer attention; its global projections return the same queries, keys and values."""
    window = 2 * SIDE_TOKENS
    if problem.tokens % window:
        return f"the in-tree Longformer layer needs a multiple of {window} tokens."
    batch_size, num_heads, tokens, head_dim = problem.inputs[0].shape
    width = num_heads * head_dim
    config = LongformerConfig(
        hidden_size=width, num_attention_heads=num_heads, attention_window=[window], attention_probs_dropout_prob=0.0
    )
    layer = LongformerSelfAttention(config, layer_id=0)
    for name in ("query", "key", "value", "query_global", "key_global", "value_global"):
        setattr(layer, name, Handed())
    chosen = list(scattered(tokens))
    hidden_states = torch.zeros_like(problem.inputs[0]).view(batch_size, tokens, width)
    is_global = torch.zeros(batch_size, tokens, dtype=torch.bool, device=hidden_states.device)
    is_global[:, chosen] = True
    masks = {
        "attention_mask": is_global.to(hidden_states.dtype) * 10000.0,
        "is_index_masked": torch.zeros_like(is_global),
        "is_index_global_attn": is_global,
        "is_global_attn": True,
    }

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer.query.given, layer.key.given, layer.value.given = q, k, v
        layer.query_global.given, layer.key_global.given, layer.value_global.given = q[chosen], k, v
        return layer(hidden_states, **masks)[0]  # type: ignore[no-any-return]

    moved = [tensor.detach().permute(2, 0, 1, 3).reshape(tokens, batch_size, width) for tensor in problem.inputs]
    return Call(forward, [tensor.requires_grad_() for tensor in moved])


def bigbird_layer(problem: Problem) -> Call | str:
    """The in-tree BigBird attention; in every call it draws its random blocks and fills a matrix of all pairs."""
    batch_size, num_heads, tokens, head_dim = problem.inputs[0].shape
    least = (5 + 2 * NUM_RANDOM_BLOCKS) * BLOCK_TOKENS
    if tokens % BLOCK_TOKENS or tokens <= least:
        return f"the in-tree BigBird layer needs a multiple of {BLOCK_TOKENS} tokens above {least}."
    config = BigBirdConfig(
        hidden_size=num_heads * head_dim,
        num_attention_heads=num_heads,
        block_size=BLOCK_TOKENS,
        num_random_blocks=NUM_RANDOM_BLOCKS,
    )
    layer = BigBirdBlockSparseAttention(config, seed=0).train()
    ones = problem.inputs[0].new_ones(batch_size, tokens).detach()
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(ones, BLOCK_TOKENS)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        masks = (band, rows, columns, blocked, blocked)
        sizes = (num_heads, NUM_RANDOM_BLOCKS, head_dim, BLOCK_TOKENS, BLOCK_TOKENS, batch_size, tokens, tokens)
        plan = {"seed": 0, "plan_from_length": None, "plan_num_rand_blocks": None}
        return layer.bigbird_block_sparse_attention(q, k, v, *masks, *sizes, **plan)[0]  # type: ignore[no-any-return]

    return Call(forward, problem.inputs)


def local_attention(problem: Problem) -> Call | str:
    """The package local-attention, with exact windows and without rotary positions."""
    left, right = SIDES[problem.name]
    if problem.tokens % left:
        return f"local-attention needs a multiple of {left} tokens."
    module = import_module("local_attention").LocalAttention(
        window_size=left,
        causal=not right,
        look_backward=1,
        look_forward=1 if right else 0,
        exact_windowsize=True,
        use_rotary_pos_emb=False,
    )
    return Call(module, problem.inputs)


def natten(problem: Problem) -> Call:
    """NATTEN's neighbourhoods; near the ends it moves the band inwards instead of cutting it."""
    step = DILATION if problem.name == "dilated" else 1
    left, right = SIDES.get(problem.name, (SIDE_TOKENS, SIDE_TOKENS))
    options = {"kernel_size": left + right + 1, "dilation": step, "is_causal": not right}
    function = import_module("natten").na1d
    return Call(lambda q, k, v: function(q, k, v, **options), problem.moved())


def xformers(problem: Problem) -> Call:
    """xformers' memory-efficient attention with a local mask."""
    left, right = SIDES[problem.name]
    biases = import_module("xformers.ops.fmha.attn_bias")
    bias = biases.LocalAttentionFromBottomRightMask(window_left=left, window_right=right)
    function = import_module("xformers.ops").memory_efficient_attention
    return Call(lambda q, k, v: function(q, k, v, attn_bias=bias), problem.moved())


def flash_attention(problem: Problem) -> Call:
    """FlashAttention-2 with a window."""
    function = import_module("flash_attn").flash_attn_func
    return Call(lambda q, k, v: function(q, k, v, window_size=SIDES[problem.name]), problem.moved())


@dataclass(frozen=True)
class Peer:
    """A peer.

    Attributes:
        patterns: the presets it can compute; empty: every pattern.
        package: the package that must be installed.
        needs_cuda: whether it runs only on CUDA devices.
        from_tokens: the shortest length at which it is measured.
    """

    build: Callable[[Problem], Call | str]
    patterns: tuple[str, ...] = ()
    package: str = "torch"
    needs_cuda: bool = False
    from_tokens: int = 1


PEERS = {
    "masked": Peer(masked),
    # compiling takes seconds at each length
    "transformers_flex": Peer(transformers_flex, from_tokens=2048),
    "transformers_flex_kernel": Peer(transformers_flex_kernel, from_tokens=2048),
    "longformer_layer": Peer(longformer_layer, ("longformer",)),
    "bigbird_layer": Peer(bigbird_layer, ("bigbird",)),
    "local_attention": Peer(local_attention, ("band", "causal_band"), "local_attention"),
    "natten": Peer(natten, ("band", "causal_band", "dilated"), "natten", needs_cuda=True),
    "xformers": Peer(xformers, ("band", "causal_band"), "xformers", needs_cuda=True),
    "flash_attention": Peer(flash_attention, ("band", "causal_band"), "flash_attn_2_cuda", needs_cuda=True),
}


def peers_of(name: str, wanted: list[str]) -> list[str]:
    """Return the wanted peers that can compute the pattern called `name`."""
    return [peer for peer in wanted if not PEERS[peer].patterns or name in PEERS[peer].patterns]


def build_peer(peer: str, problem: Problem) -> Call | str:
    """Return the call of a peer, or the sentence that says why there is none."""
    known = PEERS[peer]
    if known.needs_cuda and problem.inputs[0].device.type != "cuda":
        return f"{peer} needs a CUDA device."
    if find_spec(known.package) is None:
        return f"{peer} is not installed."
    return known.build(problem)
