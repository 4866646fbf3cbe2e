"""The pieces of ETC in which all pairs are computed: by tiles, which change nothing but the memory that they take."""

from typing import Any

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.models.etc_transformer import attention

# every query a tile of its own, in the second case but for a last one
TILES = (1, 700)
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 30}
FIELDS = {**SIZES, "local_radius": 2, "chunk_tokens": 4, "pad_token_id": 0, "max_relative_distance": 3}


def computed(**options: Any) -> list[torch.Tensor]:
    """Return the outputs of a model in float64, weights included, and the gradients of all its parameters."""
    torch.manual_seed(0)
    model = hea.EtcTransformerModel(hea.EtcTransformerConfig(**FIELDS)).double().eval()
    ids, mask = torch.randint(1, 30, (2, 37)), torch.ones(2, 37, dtype=torch.long)
    mask[0, :9] = 0
    out = model(ids, attention_mask=mask, **options)
    ((out.last_hidden_state * mask.unsqueeze(-1)).pow(3).sum() + out.global_hidden_state.pow(3).sum()).backward()
    weights = [*(out.attentions or ()), *(out.global_attentions or ())]
    assert len(weights) == 2 * len(options)
    found = [out.last_hidden_state * mask.unsqueeze(-1), out.global_hidden_state, *weights]
    return [*found, *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "options", [{}, {"output_global_attentions": True}, {"output_attentions": True, "output_global_attentions": True}]
)
def test_tiles_change_nothing(tile: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = computed(**options)
    monkeypatch.setattr(attention, "TILE_SCORES", tile)
    for each, other in zip(computed(**options), wanted, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_tiles_have_the_gradient_of_what_they_compute(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of outputs and log-sum-exps, with labels of both kinds; what dropout has left out stays out."""
    monkeypatch.setattr(attention, "TILE_SCORES", 20)
    torch.manual_seed(1)
    sizes = ((3, 2), (5, 2), (5, 2), (3, 4), (3, 2))
    states = [torch.randn(1, 2, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    labels = torch.randint(4, (1, 1, 3, 2)), torch.rand(1, 1, 3, 3) > 0.5
    allowed = torch.rand(1, 1, 3, 5) > 0.3
    allowed[:, :, 0] = False

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *of_labels: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        added = tuple(zip(of_labels, labels, strict=True))
        out, lse, _ = attention.attend_pairs(query, key, value, added, allowed, 0.5, dropout, False)
        return torch.cat((out, torch.where(allowed.any(-1), lse, 0.0).unsqueeze(-1)), -1)

    assert torch.autograd.gradcheck(attend, states)


def test_less_is_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.randn(1, 2, 64, 4, requires_grad=True) for _ in range(3)]
    allowed, kept = torch.ones(1, 1, 64, 64, dtype=torch.bool), {}
    for tile in (1 << 20, 512):
        monkeypatch.setattr(attention, "TILE_SCORES", tile)
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = attention.attend_pairs(*states, (), allowed, 0.5, 0.0, False)
        kept[tile] = sum(seen.values())
        assert out[0].requires_grad
    assert kept[512] * 3 < kept[1 << 20]
