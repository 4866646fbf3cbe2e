"""Stars compute what the specification says, token by token, gradients included; and never n² of anything."""

from typing import Any

import pytest
import torch
from models.star_transformer.star_by_tokens import star_by_tokens
from models.star_transformer.tiny_models import FASTNLP, build, random_ids
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_efficient_attn as hea

FORMS: dict[str, dict[str, Any]] = {
    "paper": {},
    "paper, open ring": {"ring": "open", "num_hidden_layers": 3},
    "shared layers, learned relay": {"share_layers": True, "relay_init": "learned", "num_hidden_layers": 3},
    "fastNLP": FASTNLP,
    "fastNLP, closed ring": {**FASTNLP, "ring": "closed"},
}


def gradients(model: Any, outputs: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of a sum that no output takes part in evenly."""
    total = sum((each * torch.arange(each.numel(), dtype=each.dtype).view_as(each).sin()).sum() for each in outputs)
    named = {name: each for name, each in model.named_parameters() if not name.startswith("embed_tokens")}
    found = torch.autograd.grad(total, list(named.values()))
    return dict(zip(named, found, strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("form", FORMS)
def test_states_and_gradients_are_those_of_the_specification(form: str, tokens: int) -> None:
    model = build("AutoModel", **FORMS[form]).double()
    ids = random_ids(1, tokens)
    found = model(ids)
    weights = dict(model.named_parameters())
    embedded = weights["embed_tokens.weight"][ids[0]] + weights["embeddings.positions.table.weight"][:tokens]
    nodes, relay = star_by_tokens(model.config, weights, embedded)
    for actual, expected in ((found.last_hidden_state[0], nodes), (found.pooler_output[0], relay)):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-10)
    actual = gradients(model, (found.last_hidden_state[0], found.pooler_output[0]))
    for name, expected in gradients(model, (nodes, relay)).items():
        torch.testing.assert_close(actual[name], expected, atol=1e-10, rtol=1e-8, msg=name)


def test_fastnlp_settings_in_float32() -> None:
    """The sizes of its scripts, as they are used: six heads of 50 in a width of 300, two updates."""
    torch.manual_seed(0)
    config = hea.StarTransformerConfig.sst(vocab_size=61)
    model = hea.StarTransformerModel(config).eval()
    ids = random_ids(3, 20)
    with torch.no_grad():
        found = model(ids)
        weights = dict(model.named_parameters())
        for row, embedded in enumerate(model.embeddings.positions.table.weight[:20] + model.embed_tokens(ids)):
            nodes, relay = star_by_tokens(config, weights, embedded)
            for actual, expected in ((found.last_hidden_state[row], nodes), (found.pooler_output[row], relay)):
                assert (actual - expected).abs().max() <= 1e-6 * expected.abs().max()


@torch.no_grad()
def test_a_closed_ring_has_no_beginning() -> None:
    """Without positions, turned texts have turned states and the same relay; an open ring tells its ends apart."""
    ids = random_ids(2, 9)
    for ring, is_equal in (("closed", True), ("open", False)):
        model = build("AutoModel", position_embedding_type="none", ring=ring)
        here, turned = model(ids), model(ids.roll(3, 1))
        assert torch.allclose(turned.last_hidden_state, here.last_hidden_state.roll(3, 1), atol=1e-5) is is_equal
        assert torch.allclose(turned.pooler_output, here.pooler_output, atol=1e-5) is is_equal


@torch.no_grad()
def test_without_positions_a_text_reads_the_same_backwards() -> None:
    ids = random_ids(2, 9)
    for positions, is_equal in (("none", True), ("sinusoidal", False)):
        model = build("AutoModel", position_embedding_type=positions)
        here, mirrored = model(ids).last_hidden_state, model(ids.flip(1)).last_hidden_state.flip(1)
        assert torch.allclose(mirrored, here, atol=1e-5) is is_equal


class LargestTensor(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that an operator returns."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return out


@pytest.mark.parametrize("ring", ["closed", "zero_ends"])
@pytest.mark.parametrize("how", ["plain", "padded", "packed"])
def test_no_tensor_grows_with_the_square_of_the_length(how: str, ring: str) -> None:
    largest = []
    for tokens in (512, 1024):
        model = build("AutoModel", max_position_embeddings=1024, ring=ring).train()
        inputs: dict[str, Any] = {"input_ids": random_ids(1, tokens)}
        if how == "padded":
            inputs["attention_mask"] = (torch.arange(tokens) < tokens - 5).long()[None]
        if how == "packed":
            # as many documents as there can be in texts that have neighbours
            inputs["position_ids"] = (torch.arange(tokens) % 2)[None]
        with LargestTensor() as note:
            model(**inputs).last_hidden_state.sum().backward()
        largest.append(note.largest)
    assert largest[1] <= 2 * largest[0]
    assert largest[1] <= 1024 * 5 * 32
