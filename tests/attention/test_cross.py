"""Queries and keys of different sequences: `attention(..., cross=True)`.

`tests/backends/test_contract.py` holds every backend against the formula in float64, gradients included.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.backends.blocked import execute
from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.layout.call import AttentionCall, inputs_of
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.patterns import Band, Causal, CompressedKeys, Full, GlobalTokens, Pattern, bigbird

NUM_QUERIES, NUM_KEYS = 30, 12


MASK, IDS = torch.ones(2, NUM_QUERIES, dtype=torch.bool), torch.zeros(2, NUM_QUERIES, dtype=torch.long)


def cross(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **options: Any) -> Any:
    return hea.attention(q, k, v, pattern, cross=True, **options)


def inputs(num_queries: int = NUM_QUERIES, num_keys: int = NUM_KEYS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, size, 8, generator=generator) for size in (num_queries, num_keys, num_keys)]


@pytest.mark.parametrize("backend", ["blocked", "sdpa"])
def test_packing_changes_nothing(backend: str) -> None:
    """Two pairs of sequences behind each other, padded between and at the ends, as each pair alone."""
    q, k, v = inputs()
    parts = [(slice(2, 12), slice(0, 5)), (slice(12, 28), slice(7, 12))]
    query_mask, key_mask = torch.zeros(2, NUM_QUERIES, dtype=torch.bool), torch.zeros(2, NUM_KEYS, dtype=torch.bool)
    # the padding has an id that a document has, too
    query_ids, key_ids = torch.full((2, NUM_QUERIES), 7), torch.full((2, NUM_KEYS), 9)
    for number, (queries, keys) in enumerate(parts):
        query_mask[:, queries], key_mask[:, keys] = True, True
        query_ids[:, queries], key_ids[:, keys] = 7 + 2 * number, 7 + 2 * number
    masks = {"query_mask": query_mask, "query_segment_ids": query_ids, "key_mask": key_mask, "segment_ids": key_ids}
    for pattern in (Full(), CompressedKeys(4, 2)):
        out, lse = cross(q, k, v, pattern, backend=backend, return_lse=True, **masks)
        for queries, keys in parts:
            alone = cross(q[:, :, queries], k[:, :, keys], v[:, :, keys], pattern, backend="reference", return_lse=True)
            torch.testing.assert_close((out[:, :, queries], lse[:, :, queries]), alone)
        outside = ~query_mask[:, None, :, None].expand_as(out)
        assert not out[outside].any()


def test_compressed_keys_are_decoded_as_they_were_trained() -> None:
    """One query after the other, behind left padding; the keys are those that have ended."""
    q, k, v = inputs()
    padding = torch.tensor([[0], [5]])
    is_token = torch.arange(NUM_QUERIES) >= padding
    whole = cross(q, k, v, CompressedKeys(4, 2), query_mask=is_token)
    for step in (3, 8, 29):
        found = cross(
            *(q[:, :, step : step + 1], k, v, CompressedKeys(4, 2)),
            query_mask=is_token[:, : step + 1],
            query_offset=step,
        )
        torch.testing.assert_close(found, whole[:, :, step : step + 1])


def test_queries_before_any_key_have_output_zero() -> None:
    """As in decoding with compressed keys before the first of them has ended."""
    q, k, v = (each.requires_grad_() for each in inputs(num_keys=0))
    sinks = torch.tensor([0.5, -torch.inf], requires_grad=True)
    for given in (None, sinks):
        leaves = [q, k, v, *(() if given is None else (given,))]
        out, lse = cross(q, k, v, CompressedKeys(4, 2), query_mask=MASK, sinks=given, return_lse=True)
        assert out.shape == q.shape
        assert not out.any()
        expected = torch.tensor(-torch.inf) if given is None else given.detach()[:, None]
        torch.testing.assert_close(lse, expected.expand(2, 2, NUM_QUERIES))
        assert not any(each.any() for each in torch.autograd.grad(out.sum(), leaves))


# torch's own imports warn when it compiles for the first time
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["blocked", "sdpa"])
def test_compiles_without_breaks(backend: str) -> None:
    q, k, v = (each.requires_grad_() for each in inputs())
    query_mask, key_mask = torch.arange(NUM_QUERIES).expand(2, -1) < 28, torch.arange(NUM_KEYS).expand(2, -1) > 1
    options = {"query_mask": query_mask, "key_mask": key_mask, "backend": backend}
    torch.compiler.reset()
    compiled = torch.compile(cross, fullgraph=True, backend="aot_eager")
    found, expected = (function(q, k, v, Band(9, 9), **options) for function in (compiled, cross))
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_a_compiler_knows_no_offset_of_query_masks() -> None:
    q, k, v = inputs()
    torch.compiler.reset()
    compiled = torch.compile(cross, fullgraph=True, backend="aot_eager")
    offset = torch.tensor(4)
    torch.testing.assert_close(
        compiled(q, k, v, Band(9, 9), query_offset=offset), cross(q, k, v, Band(9, 9), query_offset=4)
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match="check_axes"):
        compiled(q, k, v, Band(9, 9), query_offset=offset, query_mask=MASK)


def test_keys_in_several_calls_join_by_lse_and_their_gradients_add_up() -> None:
    """Long and global keys of one softmax (ETC): each call gets the joined output and log-sum-exp in its backward."""
    q, k, v = (each.double().requires_grad_() for each in inputs())
    states = (q.detach(), k.detach(), v.detach())

    def part(keys: slice) -> tuple[tuple[Tensor, ...], AttentionCall]:
        own = (states[0], states[1][:, :, keys], states[2][:, :, keys])
        layout = Layout(Full(), q.shape[1], q.shape[2], own[1].shape[2], is_cross=True)
        return own, AttentionCall(layout, inputs_of(*own), scale=0.5)

    parts = [part(slice(0, 5)), part(slice(5, NUM_KEYS))]
    outs, lses = zip(*(execute.forward(*own, call) for own, call in parts), strict=True)
    lse = torch.stack(lses).logsumexp(0)
    out = sum(each * torch.exp(own - lse)[..., None] for each, own in zip(outs, lses, strict=True))
    whole = cross(q, k, v, Full(), scale=0.5)
    torch.testing.assert_close(out, whole)
    grad = torch.randn_like(out)
    shares = [execute.backward(grad, None, *own, out, lse, call)[:3] for own, call in parts]
    (dq, *one), (more, *other) = shares
    joined = (dq + more, *(torch.cat(each, 2) for each in zip(one, other, strict=True)))
    torch.testing.assert_close(joined, torch.autograd.grad(whole, (q, k, v), grad))


def test_explain_counts_both_axes() -> None:
    explanation = hea.explain(CompressedKeys(32, 16), 4096, 255, num_heads=2, cross=True)
    assert explanation.allowed_pairs == 2 * CompressedKeys(32, 16).num_pairs(4096, 255)
    assert explanation.total_pairs == 2 * 4096 * 255
    assert "of two sequences" in explanation.to_text(400)


@pytest.mark.parametrize(
    ("pattern", "options", "error", "message"),
    [
        (Full(), {"cross": False}, InputError, "more queries .* than keys.*cross=True"),
        (Full(), {"cross": 1}, InputError, "cross=1 must be True"),
        (
            Full(),
            {"query_mask": MASK[:, :9]},
            InputError,
            r"query_mask has shape \(2, 9\); it must be \[batch, positions",
        ),
        (Full(), {"query_mask": MASK, "query_offset": 4}, InputError, r"positions\] = \[2, 34\]"),
        (Full(), {"query_mask": MASK.int()}, InputError, "query_mask has dtype torch.int32"),
        (Full(), {"query_segment_ids": IDS}, InputError, "Give both query_segment_ids"),
        (Full(), {"segment_ids": IDS[:, :NUM_KEYS].float()}, InputError, "segment_ids has dtype torch.float32"),
        (Full(), {"global_mask": MASK[:, :NUM_KEYS]}, InputError, "global_mask is for"),
        (bigbird(4, 1), {}, ConfigurationError, "the length of one sequence"),
        (GlobalTokens([-1]), {}, ConfigurationError, "the length of one sequence"),
    ],
    ids=str,
)
def test_what_two_axes_cannot_have_is_refused(
    pattern: Pattern, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        hea.attention(*inputs(), pattern, **{"cross": True, **options})


def test_compressed_keys_of_one_axis_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Give cross=True"):
        hea.attention(*inputs(NUM_KEYS), CompressedKeys(4, 2) | Band(3, 0))
    with pytest.raises(ConfigurationError, match="Give cross=True"):
        hea.explain(CompressedKeys(32, 16), query_tokens=8192, key_tokens=511)


def test_query_masks_of_one_axis_are_refused() -> None:
    with pytest.raises(InputError, match="Give cross=True"):
        hea.attention(*inputs(NUM_KEYS), Causal(), query_mask=MASK[:, :NUM_KEYS])
