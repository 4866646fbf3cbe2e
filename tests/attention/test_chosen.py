"""`attention` with chosen keys: what it refuses, autocast, compilation, export, heads of a process, and the choice."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_efficient_attn as hea
from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.layout.selected_keys import ChosenKeys
from hf_efficient_attn.patterns import Band, Causal, Full

INTS = torch.zeros(2, 1, 12, 3, dtype=torch.long)


def states(num_tokens: int = 12, num_heads: int = 4, num_key_heads: int = 2, **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    heads = (num_heads, num_key_heads, num_key_heads)
    return [torch.randn(2, each, num_tokens, 8, generator=generator, **options) for each in heads]


def choices(num_tokens: int = 12) -> list[ChosenKeys]:
    generator = torch.Generator().manual_seed(2)
    listed = torch.randint(-1, num_tokens, (2, 4, num_tokens, 3), generator=generator)
    order = torch.rand(2, 4, 2, num_tokens, generator=generator).argsort(-1)
    return [
        hea.ChosenTokens(listed),
        hea.ChosenBlocks(listed[:, :2] // 4, 4),
        hea.KeyGroups(listed.transpose(2, 3), listed.transpose(2, 3)),
        hea.ChunkedOrder(order, 4),
    ]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (INTS, "chosen is a Tensor; it must be ChosenTokens"),
        (hea.ChosenTokens([[0]]), "tokens is a list; it must be a tensor"),
        (hea.ChosenTokens(INTS.float()), "dtype torch.float32; it must hold integers"),
        (hea.ChosenTokens(INTS.to("meta")), "is on meta, and q, k and v on cpu"),
        (
            hea.ChosenTokens(INTS[:, :, :9]),
            r"shape \[2, 1, 9, 3\]; it must be \[1 or 2 examples, 1 or 2 or 4 heads",
        ),
        (hea.ChosenTokens(INTS.expand(-1, 3, -1, -1)), "it must be"),
        (hea.ChosenTokens(INTS[0]), "it must be"),
        (hea.ChosenBlocks(INTS, 0), "block_tokens=0 must be an integer of at least 1"),
        (hea.ChosenBlocks(INTS, 4, counted_from="end"), "counted_from='end' must be 'document' or 'axis'"),
        (hea.ChosenBlocks(INTS, 4, queries_per_choice=5), "3 choices, blocks"),
        (hea.KeyGroups(INTS, INTS[:, :, :5]), "the heads and groups .* must be equal"),
        (hea.KeyGroups(INTS, INTS, join="sum"), "join='sum' must be 'softmax' or 'mean'"),
        (hea.KeyGroups(INTS, INTS, join="mean", mean_epsilon=-1.0), "mean_epsilon=-1.0 must be a finite number"),
        (hea.ChunkedOrder(INTS, 4, buckets=INTS[..., :2]), "they must be equal"),
        (hea.ChunkedOrder(INTS, 4, chunks_before=-1), "chunks_before=-1 must be an integer of at least 0"),
    ],
)
def test_a_choice_that_does_not_fit_is_refused(chosen: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        hea.attention(*states(), Causal(), chosen=chosen)


def test_what_a_choice_excludes() -> None:
    q, k, v = states()
    mean = hea.KeyGroups(INTS, INTS, join="mean")
    with pytest.raises(InputError, match="no log-sum-exp"):
        hea.attention(q, k, v, Causal(), chosen=mean, return_lse=True)
    with pytest.raises(InputError, match="Leave sinks out"):
        hea.attention(q, k, v, Causal(), chosen=mean, sinks=torch.zeros(4))
    with pytest.raises(InputError, match="cross=True. Use KeyGroups"):
        hea.attention(q, k, v, Full(), chosen=hea.ChunkedOrder(INTS, 4), cross=True)
    for backend in ("blocked", "flex"):
        with pytest.raises(UnsupportedBackendError, match=f"backend='{backend}' cannot compute this.* use gathered"):
            hea.attention(q, k, v, Causal(), chosen=hea.ChosenTokens(INTS), backend=backend)
    with pytest.raises(UnsupportedBackendError, match="selected by content"):
        hea.attention(q, k, v, Causal(), backend="gathered")


@pytest.mark.parametrize("number", range(4))
def test_heads_of_a_process_choose_for_themselves(number: int) -> None:
    """Two of four heads, with a pattern for the heads of the model, as under tensor parallelism."""
    q, k, v = states()
    pattern, chosen = hea.patterns.PerHead([Causal(), Full(), Band(3, 3), Causal()]), choices()[number]
    whole = hea.attention(q, k, v, pattern, chosen=chosen, backend="gathered")
    named = {name: getattr(chosen, name) for name in (*chosen.tensor_names, *chosen.number_names)}
    own = {name: each[:, each.shape[1] // 2 :] if isinstance(each, Tensor) else each for name, each in named.items()}
    found = hea.attention(
        q[:, 2:], k[:, 1:], v[:, 1:], pattern, chosen=type(chosen)(**own), backend="gathered", first_head=2,
        num_model_heads=4,
    )  # fmt: skip
    torch.testing.assert_close(found, whole[:, 2:])


@pytest.mark.parametrize("number", range(4))
def test_under_autocast_it_is_computed_in_half_precision(number: int) -> None:
    q, k, v = (each.requires_grad_() for each in states())
    chosen = choices()[number]
    expected = hea.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), Causal(), chosen=chosen, backend="gathered")
    with torch.autocast("cpu", torch.bfloat16):
        found = hea.attention(q, k, v, Causal(), chosen=chosen, backend="gathered")
        found.sum().backward()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


class Layer(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
        found = hea.attention(q, k, v, Causal(), chosen=hea.ChosenTokens(numbers))
        order = hea.ChunkedOrder(numbers.transpose(2, 3), 4, chunks_after=1)
        groups = hea.KeyGroups(numbers.transpose(2, 3), numbers.transpose(2, 3), join="mean", mean_epsilon=0.5)
        blocks = hea.ChosenBlocks(numbers // 4, 4)
        for chosen in (order, groups, blocks):
            found = found + hea.attention(q, k, v, Causal(), chosen=chosen)
        return found


def test_compiled_without_breaks_and_exported() -> None:
    inputs, numbers = [each.requires_grad_() for each in states()], choices()[0].tensors[0]
    expected = Layer()(*inputs, numbers)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    torch.compiler.reset()
    found = torch.compile(Layer(), backend="aot_eager", fullgraph=True)(*inputs, numbers)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), inputs), wanted)
    exported = torch.export.export(Layer(), (*inputs, numbers))
    torch.testing.assert_close(exported.module()(*inputs, numbers), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("number", range(4))
def test_dropout_drops_weights_and_is_the_same_backward(number: int) -> None:
    """The output is linear in v, so that the gradient of v must give back the output of the same draw."""
    q, k, v = (each.double().requires_grad_() for each in states())
    torch.manual_seed(3)
    out = hea.attention(q, k, v, Full(), chosen=choices()[number], dropout=0.4, backend="gathered")
    plain = hea.attention(q, k, v, Full(), chosen=choices()[number], backend="gathered")
    assert not torch.allclose(out, plain)
    weight = torch.randn_like(out)
    (gradient,) = torch.autograd.grad((out * weight).sum(), v)
    torch.testing.assert_close((gradient * v).sum(), (out * weight).sum())


def test_the_choice_of_a_backend_and_what_explain_says() -> None:
    listed = torch.zeros(1, 1, 8192, 64, dtype=torch.long, device="meta")
    explanation = hea.explain(Causal(), 8192, num_key_heads=1, chosen=hea.ChosenTokens(listed))
    assert explanation.backend == "gathered"
    assert explanation.allowed_pairs == 8 * 8192 * 64 < explanation.computed_pairs < explanation.total_pairs
    assert "chosen pairs" in explanation.reasons["sdpa"] or "all pairs" in explanation.reasons["sdpa"]
    assert "selected by content" in explanation.reasons["blocked"]
    assert "only as ChosenBlocks" in explanation.reasons["flex"]
    order = hea.ChunkedOrder(torch.arange(256).expand(1, 8, 1, -1), 64)
    explanation = hea.explain(Causal(), 256, chosen=order)
    assert explanation.backend == "gathered"
    assert explanation.baseline == "dense causal attention"
    # each chunk reads itself and the one before; of the own chunk, its triangle without the diagonal; and one first row
    assert explanation.allowed_pairs == 8 * (4 * 64 * 63 // 2 + 3 * 64 * 64 + 1)
    assert "in chunks of 64" in explanation.to_text(400)
    shared = hea.ChosenTokens(torch.zeros(1, 1, 128, 64, dtype=torch.long))
    assert hea.explain(Causal(), 128, chosen=shared).backend == "sdpa"
    assert explanation.relative_cost > 0
    assert hea.explain(Causal(), 16384, chosen=order_of(16384)).backend == "gathered"


def order_of(num_tokens: int) -> ChosenKeys:
    return hea.ChunkedOrder(torch.zeros(1, 8, 1, num_tokens, dtype=torch.long, device="meta"), 64)
