"""The weights of some rows: those of output_attentions=True on all of them, for every family and other models."""

from typing import Any

import attention_models
import pytest
import torch
from models_cases import CASES, Case

import hf_efficient_attn as hea
from hf_efficient_attn.attention.weight_rows import weights_of_rows

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
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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
