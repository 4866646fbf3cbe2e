"""Bad input at model level: heads against direction, foreign checkpoints, position tables, masks, backends."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models_cases import TINY

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT

Config = hea.SimplifiedTransformerConfig


def test_checkpoint_of_another_block(tmp_path: Path) -> None:
    hea.SimplifiedTransformerForCausalLM(Config(block="sas", **TINY)).save_pretrained(tmp_path)
    message = "was saved with block='sas', and block='pre_ln' is asked for: the weights would not fit"
    with pytest.raises(hea.CheckpointError, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, block="pre_ln")
    with pytest.raises(hea.CheckpointError, match=message):
        hea.SimplifiedTransformerForCausalLM.from_pretrained(tmp_path, config=Config(block="pre_ln", **TINY))
    assert hea.SimplifiedTransformerForCausalLM.from_pretrained(tmp_path, block="sas").config.block == "sas"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reparameterized": False, "matrix_init": "normal"}, "reparameterized=True, .*reparameterized=False"),
        ({"matrix_init": "orthogonal"}, "matrix_init='identity', .*matrix_init='orthogonal'"),
        ({"attention_bias": "all"}, "attention_bias='query_key', .*attention_bias='all'"),
        ({"gated_mlp": True}, "gated_mlp=False, .*gated_mlp=True"),
        ({"trainable_gains": ["mlp_gain"]}, "trainable_gains="),
        ({"block": "sasp"}, "block='sasp'; it must be .*Did you mean 'sas_p'"),
    ],
    ids=str,
)
def test_checkpoint_of_another_structure(changes: dict, message: str, tmp_path: Path) -> None:
    """Where weights would be missing, and so random, loading is refused and names the field."""
    hea.SimplifiedTransformerForCausalLM(Config(block="sas", **TINY)).save_pretrained(tmp_path)
    with pytest.raises(hea.EfficientAttentionError, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **changes)


def test_options_of_loading_are_no_fields(tmp_path: Path) -> None:
    hea.SimplifiedTransformerForCausalLM(Config(block="sas", **TINY)).save_pretrained(tmp_path)
    for options in ({"dtype": "auto"}, {"torch_dtype": "auto"}, {"dtype": torch.bfloat16}, {"low_cpu_mem_usage": True}):
        assert hea.SimplifiedTransformerForCausalLM.from_pretrained(tmp_path, **options)


def test_mask_of_the_new_tokens_alone() -> None:
    model = hea.SimplifiedTransformerForCausalLM(Config(**TINY)).eval()
    ids = torch.ones(1, 4, dtype=torch.long)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(
        hea.InputError,
        match="covers 4 tokens, but 4 are cached and 4 are new. Pass a mask of 8 .*another text, pass an empty cache",
    ):
        model(ids, attention_mask=torch.ones_like(ids), **{CACHE_ARGUMENT: cache})


def test_sequence_past_the_learned_table() -> None:
    model = hea.SimplifiedTransformerForCausalLM(Config(position_embedding_type="learned", **TINY)).eval()
    ids = torch.ones(1, 64, dtype=torch.long)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(hea.InputError, match="reaches position 64, but .* max_position_embeddings=64"):
        model(ids[:, :1], **{CACHE_ARGUMENT: cache})
    with pytest.raises(hea.InputError, match="Truncate to 64 tokens"):
        model(torch.ones(1, 65, dtype=torch.long))
    with pytest.raises(hea.InputError, match="reaches position 64"):
        model(ids[:, :4], position_ids=torch.arange(61, 65)[None])
    with pytest.raises(hea.InputError, match="reaches position 64"):
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, cache_implementation="static")
    # packed documents may be longer together than the table
    positions = torch.arange(100)[None] % 50
    assert model(torch.ones(1, 100, dtype=torch.long), position_ids=positions).logits.shape[1] == 100


@pytest.mark.parametrize("kind", ["sinusoidal", "scaled_sinusoidal", "rope", "alibi", "none"])
def test_other_positions_have_no_longest_sequence(kind: str) -> None:
    model = hea.SimplifiedTransformerForCausalLM(Config(position_embedding_type=kind, **TINY)).eval()
    assert torch.isfinite(model(torch.ones(1, 150, dtype=torch.long)).logits).all()


@pytest.mark.parametrize("mechanism", ["linear", [None, "prior"]], ids=str)
def test_mechanisms_of_other_families_are_refused(mechanism: Any) -> None:
    """In new configs and in saved ones, which may hold the fields of such layers at their defaults."""
    with pytest.raises(hea.ConfigurationError, match="mechanism=.* is no field .* only CompressedTransformerConfig"):
        hea.SimplifiedTransformerConfig(mechanism=mechanism)
    saved = {**hea.SimplifiedTransformerConfig().to_dict(), "mechanism": mechanism, "chunk_tokens": 128}
    with pytest.raises(hea.ConfigurationError, match="simplified blocks have softmax attention alone"):
        hea.SimplifiedTransformerConfig.from_dict(saved)
    loaded = hea.SimplifiedTransformerConfig.from_dict({**saved, "mechanism": None})
    assert loaded.to_dict() == hea.SimplifiedTransformerConfig().to_dict()
