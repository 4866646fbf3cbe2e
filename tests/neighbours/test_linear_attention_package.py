"""Linear attention of the package linear-attention-transformer in float64, with padding and gradients.

Its features are others: softmax over the numbers of a query, and exp of a key. Bidirectional, it divides those of keys
by their sums over the text, and no output by the sum of its weights. Its sums are those of any features, so it is given
ours, as logarithms: of keys, and of queries, bidirectional times the sums by which keys are divided.
"""

from typing import Any

import pytest
import torch
from models.compressed_transformer.tiny_models import build
from torch import Tensor

package = pytest.importorskip("linear_attention_transformer.linear_attention_transformer")
MAPS: dict[str, dict[str, Any]] = {
    "elu": {"normalizer_epsilon": 1e-14},
    "positive_random": {"feature_map": "positive_random", "num_features": 8},
}


def of_package(attention: Any, text: Tensor, real: Tensor) -> Tensor:
    """Return what tokens read, before the last map, [B, T, hidden_size] → the same."""
    query, key, value = (attention.heads(each) for each in attention.project(text))
    (queries, _), (keys, exponents) = attention.features(query), attention.features(key)
    queries, keys = queries.log(), keys.log() if exponents is None else keys.log() + exponents.unsqueeze(-1)
    if attention.is_causal:
        # it divides by at least 0.001, and a factor of all keys changes nothing else
        out = package.causal_linear_attn(queries, keys + 10, value, kv_mask=real, bucket_size=1)
    else:
        sums = keys.masked_fill(~real[:, None, :, None], -torch.inf).logsumexp(-2, keepdim=True)
        out = package.linear_attn(queries + sums, keys, value, kv_mask=real) * attention.head_dim**0.5
    return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("features", MAPS)
def test_attention_of_the_package(features: str, is_causal: bool) -> None:
    model = build("AutoModel", mechanism="linear", is_causal=is_causal, chunk_tokens=4, **MAPS[features])
    attention = model.double().layers[0].self_attn
    text = torch.randn(2, 11, 32, dtype=torch.float64, requires_grad=True)
    real = torch.arange(11) < torch.tensor([[11], [7]])
    found = attention.attend(text, real, False)[0][real]
    expected = of_package(attention, text, real)[real]
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-9)
    weight = torch.randn(found.shape, dtype=torch.float64)
    given = [text, attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    slopes = [torch.autograd.grad((each * weight).sum(), given) for each in (found, expected)]
    for own, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(own, wanted, atol=1e-10, rtol=1e-8)
