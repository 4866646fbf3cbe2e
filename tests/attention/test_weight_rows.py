"""The weights of some rows: those of output_attentions=True on all of them, for every family and other models."""

from typing import Any

import attention_models
import pytest
import torch
from families import CASES
from models_cases import Case, case_param

import hf_efficient_attn as hea
from hf_efficient_attn.attention.layer import weights_of_rows
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.selected_keys import ChosenKeys, States
from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.patterns import Full

ROWS = (0, 1, 7, 20)
SPARSIFIED = ("llama", "gemma3", "bert", "modernbert", "bart", "t5")


def both(model: Any, **inputs: Any) -> tuple[Any, Any]:
    with torch.no_grad():
        everything = model(**inputs, output_attentions=True)
        with weights_of_rows(ROWS):
            some = model(**inputs, output_attentions=True)
    return everything, some


def compare(model: Any, tolerance: float, **inputs: Any) -> None:
    everything, some = both(model, **inputs)
    assert len(some.attentions) == len(everything.attentions) > 0
    for all_weights, weights in zip(everything.attentions, some.attentions, strict=True):
        assert weights.shape == (*all_weights.shape[:2], len(ROWS), all_weights.shape[3])
        torch.testing.assert_close(weights, all_weights[:, :, list(ROWS)], atol=tolerance, rtol=0)
    torch.testing.assert_close(some.last_hidden_state, everything.last_hidden_state, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize("case", [case_param(case, is_thorough=not case.shows_a_route) for case in CASES])
def test_families(case: Case) -> None:
    torch.manual_seed(0)
    model = case.model("AutoModel")
    model.set_attn_implementation("efficient")
    ids = attention_models.token_ids(2, 21)
    mask = attention_models.padding(ids, "right")
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    compare(model, 1e-6, input_ids=ids, attention_mask=mask)


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize("name", SPARSIFIED)
def test_other_models(name: str) -> None:
    model = hea.sparsify(attention_models.build(name), attention_models.PATTERN).base_model
    model = model.get_encoder() if model.config.is_encoder_decoder else model
    ids = attention_models.token_ids(2, 21)
    compare(model, 1e-6, input_ids=ids, attention_mask=attention_models.padding(ids, "right"))


@pytest.mark.filterwarnings("ignore:output_attentions=True")
def test_global_rows_with_projections() -> None:
    """Of a global token, the weights of its own projections; here every seventh token is global."""
    torch.manual_seed(0)
    config = hea.SparseTransformerConfig.longformer(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, global_tokens={"every": 7},
    )  # fmt: skip
    model = hea.SparseTransformerModel(config).eval()
    for layer in model.layers:
        layer.self_attn.global_attention.q_proj.weight.data.normal_()
    compare(model, 1e-6, input_ids=attention_models.token_ids(1, 21))


def orders() -> dict[str, ChosenKeys]:
    """Return choices of 30 keys for the last 13 queries, for two examples and two heads."""
    rounds = torch.stack([torch.randperm(33) for _ in range(8)]).view(2, 2, 2, 33)
    groups = torch.stack([torch.randperm(30)[:12] for _ in range(20)]).view(2, 2, 5, 12)
    reads = torch.randint(-1, 14, (2, 1, 14, 3))
    return {
        "circle": hea.ChunkedOrder(rounds, 5, chunks_before=1, chunks_after=1),
        "buckets": hea.ChunkedOrder(rounds, 5, buckets=rounds % 3, counts_duplicates=False),
        "one order": hea.ChunkedOrder(rounds[:1, :1, :1], 40),
        "listed": hea.ChunkedOrder(rounds, 5, reads=reads),
        "groups": hea.KeyGroups(groups[..., :6], groups),
        "places": hea.KeyGroups(groups[:1], groups, first_place=2),
    }


@pytest.mark.parametrize("name", ["circle", "buckets", "one order", "listed", "groups", "places"])
def test_the_choice_of_one_query_is_its_row_and_holds_only_its_groups(name: str) -> None:
    torch.manual_seed(0)
    chosen: Any = orders()[name]
    of_all = chosen.counts(Layout(Full(), 2, 13, 30, 17), NO_MASK, 2)
    for query, position in enumerate(range(17, 30)):
        layout = Layout(Full(), 2, 1, 30, position)
        own = chosen.of_query(query, position)
        own.check(States(2, 2, 2, 1, 30, torch.device("cpu")))
        expected = of_all[:, :, query : query + 1]
        assert torch.equal(own.counts(layout, NO_MASK, 2).expand_as(expected), expected)
        if isinstance(own, hea.KeyGroups):
            most = max(1, int((chosen.queries == position).sum((2, 3)).max()))
            assert own.queries.shape[2] == own.keys.shape[2] == most
        else:
            # one chunk of each round, and those that it reads
            width = chosen.groups().keys.shape[3] // chosen.chunk_tokens
            assert own.num_chunks == chosen.order.shape[2] * (1 + width)
