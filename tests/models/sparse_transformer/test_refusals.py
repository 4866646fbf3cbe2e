"""Bad input at model level: checkpoints of other families, lengths, token types, kernels that drop the pattern."""

import pytest
import torch
from models_cases import TINY

import hf_efficient_attn as hea

Config = hea.SparseTransformerConfig


def test_token_types() -> None:
    ids = torch.randint(3, 60, (1, 5))
    without = hea.SparseTransformerModel(Config.sliding(**TINY))
    without(ids, token_type_ids=torch.zeros_like(ids))
    with pytest.raises(hea.InputError, match="no token types"):
        without(ids, token_type_ids=torch.ones_like(ids))
    with pytest.raises(hea.InputError, match="type_vocab_size=1"):
        hea.SparseTransformerModel(Config.longformer(**TINY))(ids, token_type_ids=torch.ones_like(ids))


def test_sparsify_changes_the_pattern_of_a_sparse_model() -> None:
    torch.manual_seed(0)
    model = hea.SparseTransformerModel(Config.sliding(**TINY, left=1)).eval()
    ids = torch.randint(3, 60, (1, 30))
    with torch.no_grad():
        narrow = model(ids).last_hidden_state
        wide = hea.sparsify(model, hea.patterns.Band(8, 8))(ids).last_hidden_state
        again = hea.sparsify(model, hea.patterns.Band(1, 1))(ids).last_hidden_state
    assert not torch.allclose(narrow, wide, atol=1e-3)
    torch.testing.assert_close(again, narrow)
