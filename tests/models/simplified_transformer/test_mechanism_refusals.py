"""What mechanisms exclude in simplified blocks, in all layers or in some, and which reasons the messages give."""

from typing import Any

import pytest
import torch
from compressed_cases import compressed
from models_cases import TOLERANCE, random_ids
from simplified_cases import simplified

import hf_efficient_attn as hea
from hf_efficient_attn.attention.indexed.config_field import has_indexer
from hf_efficient_attn.patterns import Band

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mechanism": ["linear"]}, "lists 1 mechanisms for 2 layers; give one each"),
    ({"mechanism": []}, "lists 0 mechanisms for 2 layers"),
    ({"mechanism": ["linear", "talking_heads"]}, "start as the identity with 'talking_heads', too"),
    ({"mechanism": [None, "linformer"]}, "'linformer' reads slots that trained maps make"),
    (
        {"mechanism": [None, "linear"], "prior_width_tokens": 3},
        r"attention with a prior, but mechanism is \[None",
    ),
    ({"mechanism": [None, "prior"], "chunk_tokens": 4}, r"is of linear attention, but mechanism is \[None, 'prior'"),
    ({"mechanism": ["linear", None], "span": "adaptive"}, "cannot weigh each by its distance"),
    ({"mechanism": ["prior", None], "span": "adaptive"}, "weighs keys by their distance already"),
    ({"mechanism": ["prior", None], "position_embedding_type": "alibi"}, "ALiBi is another prior by distance"),
    ({"mechanism": ["linear"] * 2, "position_embedding_type": "rope"}, "no function of distances"),
    ({"mechanism": ["linear"] * 2, "attention_pattern": Band(3, 0)}, "is read whole by all queries behind it"),
    ({"mechanism": ["linear", None], "attention_pattern": [Band(3, 0)] * 2}, "pattern for layer 0, whose mechanism"),
    ({"mechanism": ["linear", None], "block": "pre_ln", "num_key_value_heads": 2}, "adds up keys of its own"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_what_no_block_can_have_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=message):
        simplified("tiny", **fields).config()


def test_kernels_of_softmax_alone_are_refused() -> None:
    model = simplified("tiny", mechanism=["linear", None]).model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(hea.UnsupportedBackendError, match="and not that of mechanism=.'linear', None"):
        model(random_ids(1, 5))
    with pytest.raises(hea.ConfigurationError, match="is not known"):
        hea.training_memory(model, tokens=8)


@pytest.mark.parametrize("mechanism", ["prior", [None, "prior"], [None, "linear"]], ids=str)
def test_indexers_are_refused_before_anything_changes(mechanism: Any) -> None:
    model = simplified("tiny", mechanism=mechanism, position_embedding_type="rope").model()
    with pytest.raises(hea.UnsupportedBackendError, match="index chooses keys for plain softmax attention"):
        hea.index(model, top_k=4)
    assert not has_indexer(model.config)


NOT_BUILT: dict[str, dict[str, Any]] = {
    "nystrom": {"num_landmarks": 4, "conv_kernel_size": None},
    "talking_heads": {},
    "residual_scores": {},
    "reused_weights": {"mechanism": ["pattern", "reused_weights"]},
    "collaborative_heads": {},
}


@pytest.mark.parametrize("mechanism", NOT_BUILT)
@torch.no_grad()
def test_mechanisms_that_are_refused_read_the_mean_where_queries_are_zero(mechanism: str) -> None:
    """As the message says: shaped attention would start as the identity with them."""
    message = f"start as the identity with '{mechanism}', too, .*not built here"
    with pytest.raises(hea.ConfigurationError, match=message):
        simplified("tiny", mechanism=mechanism).config()
    case = compressed(mechanism, **{"mechanism": mechanism, **NOT_BUILT[mechanism]})
    torch.manual_seed(0)
    model, seen = hea.CompressedTransformerModel(case.config()).eval(), []
    for layer in model.layers:
        # the map of queries that are reused is in the layer below
        if layer.self_attn.q_proj is not None:
            layer.self_attn.q_proj.weight.zero_()
    attention = model.layers[1].self_attn
    attention.register_forward_hook(lambda module, given, out: seen.extend((given[0], out[0])))
    model(random_ids(2, 40))
    mean = attention.o_proj(attention.v_proj(seen[0]).mean(1, keepdim=True))
    torch.testing.assert_close(seen[1], mean.expand_as(seen[1]), atol=1e-7, rtol=TOLERANCE)
