"""Pipeline parallelism is refused, by families when they are loaded and by sparsified models at the first forward."""

from types import SimpleNamespace

import pytest
import torch
from families import BY_NAME
from training.tiny_models import sparse_llama
from transformers.distributed import DistributedConfig

import hf_efficient_attn as hea


@pytest.mark.parametrize("name", ["sparse-longformer", "routing-causal", "star-paper"])
def test_families_refuse_stages(name: str) -> None:
    """What all inherit, and what two families put before it."""
    model = BY_NAME[name].model()
    with pytest.raises(hea.UnsupportedBackendError, match=rf"\(pp_size\) would compute {type(model).__name__} wrongly"):
        type(model).maybe_distribute_model(model, DistributedConfig(pp_size=2), None)


def test_sparsified_models_refuse_stages() -> None:
    """What transformers leaves in a model whose layers it has dealt out; processes would else wait for each other."""
    model = sparse_llama()
    model._pp_stage = SimpleNamespace(pp_is_first_stage=True)
    with pytest.raises(hea.UnsupportedBackendError, match="pp_size"):
        model(torch.ones(1, 4, dtype=torch.long))
