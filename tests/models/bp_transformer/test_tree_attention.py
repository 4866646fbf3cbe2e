"""States are those of the specification, node by node, gradients included, however a text is padded and computed."""

from typing import Any

import pytest
import torch
from models.bp_transformer.tiny_models import build
from models.bp_transformer.tree_by_nodes import tree_by_nodes
from models_cases import random_ids
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.attention.layer import weights_of_rows
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT

FORMS: dict[str, dict[str, Any]] = {
    "both sides": {"num_nodes": 1, "clip_distance": 2, "num_hidden_layers": 3},
    "left": {"num_nodes": 2, "clip_distance": 1, "is_causal": True},
    "without relations": {"num_nodes": 3, "position_embedding_type": "learned"},
}
# two holes, one of them a whole span, and padding on either side
HOLES = [False, True, True, False, True, False, False, False, False, True, True, True, True, False]


def gradients(model: Any, outputs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of a sum that no output takes part in evenly."""
    total = sum((each * torch.arange(each.numel(), dtype=each.dtype).view_as(each).sin()).sum() for each in outputs)
    named = {name: each for name, each in model.named_parameters() if not name.startswith("embed_tokens")}
    return dict(zip(named, torch.autograd.grad(total, list(named.values()), allow_unused=True), strict=True))


def compare(model: Any, ids: Tensor, mask: list[bool]) -> None:
    """Compare states and gradients of a row with the specification; masks are counted from the first real token."""
    first, last = mask.index(True), len(mask) - 1 - mask[::-1].index(True)
    real = torch.tensor(mask)
    found = model(ids, attention_mask=real[None].long())
    weights = dict(model.named_parameters())
    embedded = weights["embed_tokens.weight"][ids[0]]
    if "positions.table.weight" in weights:
        embedded = embedded + weights["positions.table.weight"][(real.cumsum(0) - 1).clamp(min=0)]
    inside = slice(first, last + 1)
    tokens, root = tree_by_nodes(model.config, weights, embedded[inside], mask[inside])
    expected, actual = (tokens[real[inside]], root), (found.last_hidden_state[0, real], found.pooler_output[0])
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)
    wanted = gradients(model, expected)
    for name, each in gradients(model, actual).items():
        other = torch.zeros_like(each) if wanted[name] is None else wanted[name]
        torch.testing.assert_close(each, other, atol=1e-10, rtol=1e-8, msg=name)


@pytest.mark.parametrize("tokens", [1, 2, 3, 6, 8, 13])
@pytest.mark.parametrize("form", FORMS)
def test_states_and_gradients_are_those_of_the_specification(form: str, tokens: int) -> None:
    compare(build("AutoModel", **FORMS[form]).double(), random_ids(1, tokens), [True] * tokens)


@pytest.mark.parametrize("form", FORMS)
def test_masked_tokens_are_not_read_nor_spans_of_them_alone(form: str) -> None:
    compare(build("AutoModel", **FORMS[form]).double(), random_ids(1, len(HOLES)), HOLES)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_compute_the_same(form: str) -> None:
    with hea.use_backend("blocked"):
        compare(build("AutoModel", **{**FORMS[form], "num_hidden_layers": 2}).double(), random_ids(1, 37), [True] * 37)


@pytest.mark.parametrize("is_causal", [True, False])
def test_documents_with_holes_are_as_alone(is_causal: bool) -> None:
    model = build("AutoModel", is_causal=is_causal, num_nodes=1).double()
    lengths = (5, 12, 3)
    mask = torch.tensor([True] * 5 + HOLES[1:-1] + [True] * 3)[None]
    ids, numbers = random_ids(1, 20), torch.arange(3).repeat_interleave(torch.tensor(lengths))[None]
    with torch.no_grad():
        packed = model(ids, mask.long(), seq_idx=numbers).last_hidden_state
        parts = zip(ids.split(lengths, 1), mask.split(lengths, 1), strict=True)
        alone = torch.cat([model(part, own.long()).last_hidden_state for part, own in parts], 1)
    torch.testing.assert_close(packed[mask], alone[mask], atol=1e-12, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:output_attentions=True")
def test_weights_of_tokens_are_shown() -> None:
    """Of all tokens, of some, and of those behind a cache."""
    model, ids = build("AutoModel", is_causal=True), random_ids(2, 9)
    with torch.no_grad():
        whole = model(ids, output_attentions=True, use_cache=False).attentions
        with weights_of_rows((2, 7)):
            some = model(ids, output_attentions=True, use_cache=False).attentions
        cache = model(ids[:, :6], use_cache=True).past_key_values
        behind = model(ids[:, 6:], **{CACHE_ARGUMENT: cache}, output_attentions=True).attentions
    for layer, weights in enumerate(whole):
        assert weights.shape == (2, 4, 9, 18)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9))
        torch.testing.assert_close(some[layer], weights[:, :, [2, 7]], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(behind[layer], weights[:, :, 6:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
def test_matrices_of_other_pairs_are_refused(is_causal: bool) -> None:
    model = build(is_causal=is_causal)
    matrix = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    matrix = matrix.tril() if is_causal else matrix
    matrix[0, 0, 4, 1] = False
    with pytest.raises(hea.InputError, match="other pairs than a padding mask"):
        model(random_ids(1, 6), attention_mask=matrix)
