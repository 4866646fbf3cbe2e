"""The operator of blocked of torch: registered right, compiled and exported, refusals clear."""

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.attention.functional import attention
from hf_efficient_attn.backends.operator import attention_operator
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.operator_args import write_call_text
from hf_efficient_attn.layout.score_terms import Distance, Term
from hf_efficient_attn.patterns.bands import Band, Causal
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Pattern

PATTERN = Band(10, 10) | GlobalTokens([0])


def inputs(num_tokens: int = 100, requires_grad: bool = True, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(2, heads, num_tokens, 16) for heads in (4, 2, 2)]
    return [torch.randn(shape, dtype=dtype).requires_grad_(requires_grad) for shape in shapes]


def blocked(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern = PATTERN, **options: object) -> Tensor:
    return attention(q, k, v, pattern, backend="blocked", **options)


@pytest.mark.parametrize("with_term", [False, True])
def test_opcheck(with_term: bool) -> None:
    labels = (Distance(-4, 4),) if with_term else ()
    values = [torch.randn(1, 4, 1, 9, requires_grad=True)] if with_term else []
    masks = [torch.arange(100).expand(2, -1) < torch.tensor([[100], [80]]), *[None] * 4]
    call_text = write_call_text(PATTERN, 0, labels)
    sinks, softcap = (torch.randn(4, requires_grad=True), 2.0) if with_term else (None, None)
    arguments = (*inputs(), masks, [], values, sinks, None, None, call_text, "", 0, softcap, 0.25, 0.0, "blocked")
    torch.library.opcheck(attention_operator, arguments)


def test_compiles_without_breaks_and_sees_a_changed_pattern() -> None:
    torch.compiler.reset()
    compiled = torch.compile(blocked, fullgraph=True, backend="aot_eager")
    tensors = inputs()
    for pattern in (PATTERN, Band(3, 3), Band(4, 3)):
        out, expected = compiled(*tensors, pattern), blocked(*tensors, pattern)
        torch.testing.assert_close(out, expected)
        grads, right = (torch.autograd.grad(value.square().sum(), tensors) for value in (out, expected))
        torch.testing.assert_close(grads, right)


def test_compiles_once_for_many_lengths() -> None:
    torch.compiler.reset()
    compiled = torch.compile(blocked, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_tokens in (50, 70, 333):
            tensors = inputs(num_tokens, requires_grad=False)
            torch.testing.assert_close(compiled(*tensors), blocked(*tensors))


def test_a_query_offset_as_a_tensor_is_no_break() -> None:
    torch.compiler.reset()
    q, k, v = inputs(requires_grad=False)

    def step(q: Tensor, offset: Tensor) -> Tensor:
        return attention(q, k, v, Band(10, 0), query_offset=offset)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for offset in (0, 30, 99):
        row = q[:, :, offset : offset + 1]
        expected = attention(q, k, v, Band(10, 0))[:, :, offset : offset + 1]
        torch.testing.assert_close(compiled(row, torch.tensor(offset)), expected)
        torch.testing.assert_close(step(row, torch.tensor(offset)), expected)


def test_exports() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return blocked(q, k, v)

    tensors = tuple(inputs(requires_grad=False))
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(Module(), tensors, dynamic_shapes=[{2: tokens}] * 3)
    longer = inputs(257, requires_grad=False)
    torch.testing.assert_close(program.module()(*longer), blocked(*longer))


def test_second_derivatives_are_refused() -> None:
    q, k, v = inputs()
    (gradient,) = torch.autograd.grad(blocked(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedBackendError, match="no second derivative"):
        gradient.sum().backward()


def test_torch_func_is_refused() -> None:
    q, k, v = inputs(requires_grad=False)
    with pytest.raises(UnsupportedBackendError, match=r"torch\.func"):
        torch.func.grad(lambda q: blocked(q, k, v).sum())(q)
    with pytest.raises(UnsupportedBackendError, match=r"torch\.func"):
        torch.func.vmap(lambda row: blocked(row[None], k[:1], v[:1]))(q)


def test_dropout_is_drawn_from_the_global_generator_and_repeated_by_checkpointing() -> None:
    tensors = inputs()
    torch.manual_seed(0)
    out = blocked(*tensors, dropout=0.3)
    grads = torch.autograd.grad(out.square().sum(), tensors)
    torch.manual_seed(0)
    again = torch.utils.checkpoint.checkpoint(blocked, *tensors, dropout=0.3, use_reentrant=False)
    assert torch.equal(again, out)
    torch.testing.assert_close(torch.autograd.grad(again.square().sum(), tensors), grads, rtol=0, atol=0)
    assert not torch.equal(blocked(*tensors, dropout=0.3), out)


def test_dropout_keeps_the_expectation_and_drops_what_it_says() -> None:
    """With values of one, a row's output is the sum of its kept weights."""
    q, k, _ = inputs(requires_grad=False)
    ones = torch.ones_like(k)
    sums = torch.stack([blocked(q, k, ones, dropout=0.25)[..., 0] for _ in range(50)])
    assert abs(float(sums.mean()) - 1) < 0.01
    kept_alone = blocked(q, k, ones, Band(0, 0), dropout=0.25)[..., 0]
    torch.testing.assert_close(kept_alone.unique(), torch.tensor([0.0, 4 / 3]))


def test_gradients_under_dropout_are_those_of_the_drawn_weights() -> None:
    """Central differences under the same draw."""
    values = torch.randn(1, 4, 1, 9, dtype=torch.float64, requires_grad=True)
    leaves = [*inputs(40, dtype=torch.float64), values]
    weight = torch.randn(2, 4, 40, 16, dtype=torch.float64)

    def loss(q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> Tensor:
        torch.manual_seed(1)
        return (blocked(q, k, v, terms=(Term(values, Distance(-4, 4)),), dropout=0.3) * weight).sum()

    grads = torch.autograd.grad(loss(*leaves), leaves)
    for index, gradient in enumerate(grads):
        step = torch.randn_like(leaves[index]) * 1e-5
        moved = [
            loss(*(leaf + sign * step if i == index else leaf for i, leaf in enumerate(leaves))) for sign in (1, -1)
        ]
        torch.testing.assert_close((moved[0] - moved[1]) / 2, (gradient * step).sum(), rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize("pattern", [PATTERN, Causal(), Band(40, 0)], ids=str)
def test_views_in_any_memory_order(pattern: Pattern) -> None:
    """[B, N, H, D] in memory, as models have it, and a slice of a longer cache."""
    q, k, v = (torch.randn(2, 90, 4, 32)[..., :16].transpose(1, 2) for _ in range(3))
    expected = blocked(*(x.contiguous() for x in (q, k, v)), pattern)
    torch.testing.assert_close(blocked(q, k, v, pattern), expected)
    last = blocked(q[:, :, -7:], k, v, pattern)
    torch.testing.assert_close(last, expected[:, :, -7:])


def test_is_the_public_function() -> None:
    assert hea.attention is attention
