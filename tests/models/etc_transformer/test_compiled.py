"""Compiled ETCs on packed documents: as many global tokens as the plain model has, and memory for tokens, not pairs."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from models.etc_transformer.tiny_models import build, random_ids
from torch._dynamo.backends.common import aot_autograd

POSITIONS = torch.tensor([[*range(9), *range(2), *range(10)], [*range(21)]])


def compiled(model: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def test_packed_documents_have_the_states_of_the_plain_model() -> None:
    model, ids = build(spare_chunks=1, num_hidden_layers=1).double(), random_ids(2, 21)
    found = []
    for each in (model, compiled(model)):
        out = each(ids, position_ids=POSITIONS)
        (out.last_hidden_state.sin().sum() + out.global_hidden_state.cos().sum()).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        found.append((out.last_hidden_state, out.global_hidden_state, out.global_mask, out.global_documents, gradients))
    torch.testing.assert_close(found[1], found[0])
    assert found[1][1].shape == (2, 7, 32)


def test_rows_of_too_many_documents_are_refused() -> None:
    """The plain model gives them more global tokens."""
    model, ids = build(spare_chunks=0, num_hidden_layers=1), random_ids(2, 21)
    with torch.no_grad():
        assert model(ids, position_ids=POSITIONS).global_hidden_state.shape[1] == 7
        with pytest.raises(RuntimeError, match="spare_chunks"):
            compiled(model)(ids, position_ids=POSITIONS)


def test_a_class_of_what_may_be_several_documents_is_refused() -> None:
    model, ids = build("AutoModelForSequenceClassification", num_hidden_layers=1), random_ids(2, 21)
    step = compiled(model)
    torch.testing.assert_close(step(ids).logits, model(ids).logits)
    with pytest.raises(Exception, match="may hold packed documents"):
        step(ids, position_ids=POSITIONS)


def test_no_scores_of_all_pairs_are_held() -> None:
    """The largest tensor of a training step's graphs; a score for each head, token and global token has more."""
    sizes: list[int] = []

    def measured(graph: Any, _: Any) -> Any:
        sizes.extend(each.meta["val"].numel() for each in graph.graph.nodes if hasattr(each.meta.get("val"), "numel"))
        return make_boxed_func(graph.forward)

    heads, tokens, chunk = 4, 512, 16
    model = build(num_hidden_layers=1, local_radius=4, chunk_tokens=chunk, num_attention_heads=heads).train()
    torch.compiler.reset()
    step = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=measured, bw_compiler=measured))
    found = step(random_ids(1, tokens), position_ids=(torch.arange(tokens) % 32)[None])
    found.last_hidden_state.sum().backward()
    num_global = found.global_hidden_state.shape[1]
    assert num_global == tokens // chunk + tokens // chunk // 4 + 8
    # which tokens a global token reads
    assert max(sizes) == num_global * (num_global + tokens)
