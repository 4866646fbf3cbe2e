"""Bad input at model level: checkpoints of other families, lengths, token types, kernels that drop the pattern."""

from pathlib import Path

import pytest
import torch
import transformers
from models_cases import TINY

import hf_efficient_attn as hea

Config = hea.SparseTransformerConfig


def test_checkpoint_of_another_family_names_the_converter(tmp_path: Path) -> None:
    transformers.BertConfig(**{**TINY, "num_hidden_layers": 1}).save_pretrained(tmp_path)
    with pytest.raises(
        hea.CheckpointError, match=r"holds a 'bert' model; .* `hf-efficient-attn convert .* NEW_FOLDER`"
    ):
        hea.SparseTransformerForMaskedLM.from_pretrained(tmp_path)


def test_more_tokens_than_positions_names_the_converter() -> None:
    model = hea.SparseTransformerModel(Config.longformer(**{**TINY, "attention_window": 8}))
    ids = torch.randint(3, 60, (1, TINY["max_position_embeddings"] + 1))
    assert model(ids[:, :-1]).last_hidden_state.shape[1] == TINY["max_position_embeddings"]
    with pytest.raises(hea.InputError, match="reaches position 64.*--max-position-embeddings 65"):
        model(ids)


def test_token_types() -> None:
    ids = torch.randint(3, 60, (1, 5))
    without = hea.SparseTransformerModel(Config.sliding(**TINY))
    without(ids, token_type_ids=torch.zeros_like(ids))
    with pytest.raises(hea.InputError, match="no token types"):
        without(ids, token_type_ids=torch.ones_like(ids))
    with pytest.raises(hea.InputError, match="has type 1, but type_vocab_size=1: types are 0 to 0"):
        hea.SparseTransformerModel(Config.longformer(**TINY))(ids, token_type_ids=torch.ones_like(ids))


def test_kernels_that_would_drop_the_pattern() -> None:
    model = hea.SparseTransformerModel(Config.sliding(**TINY))
    for name in ("flash_attention_2", "vllm", "sglang", "flash_attention_3"):
        model.config._attn_implementation = name
        with pytest.raises(hea.UnsupportedBackendError, match=f"'{name}' would drop the attention pattern"):
            model(torch.randint(3, 60, (1, 5)))


def test_both_kinds_of_input_and_masks_that_end_early() -> None:
    model = hea.SparseTransformerModel(Config.sliding(**TINY))
    ids = torch.randint(3, 60, (1, 5))
    with pytest.raises(hea.InputError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(hea.InputError, match="attention_mask covers 3 tokens"):
        model(ids, attention_mask=torch.ones(1, 3))


def test_inputs_of_another_shape() -> None:
    model = hea.SparseTransformerModel(Config.longformer(**TINY))
    ids = torch.randint(3, 60, (2, 5))
    with pytest.raises(hea.InputError, match=r"no tokens: input_ids has shape \[2, 0\]"):
        model(ids[:, :0])
    with pytest.raises(hea.InputError, match=r"input_ids has shape \[5\]; it must be \[batch, tokens\]"):
        model(ids[0])
    with pytest.raises(hea.InputError, match=r"inputs_embeds has shape \[2, 5\]; it must be \[batch, tokens, hidden"):
        model(inputs_embeds=ids.float())


@pytest.mark.parametrize("shape", [(2, 9), (9,), (1, 2, 3, 4)])
def test_choices_have_an_axis_of_their_own(shape: tuple[int, ...]) -> None:
    model = hea.SparseTransformerForMultipleChoice(Config.longformer(**TINY))
    ids = torch.randint(3, 60, shape)
    with pytest.raises(hea.InputError, match=r"input_ids has shape .*; it must be \[batch, choices, tokens\]"):
        model(ids)
    with pytest.raises(hea.InputError, match="exactly one of input_ids and inputs_embeds"):
        model()


def test_masks_that_say_something_else() -> None:
    model = hea.SparseTransformerModel(Config.sliding(**TINY))
    ids = torch.randint(3, 60, (2, 5))
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[:, 0] = 2
    with pytest.raises(hea.InputError, match=r"holds 2; .* belong into global_attention_mask"):
        model(ids, attention_mask=mask)
    with pytest.raises(hea.InputError, match="it must hold 1 for tokens and 0 for padding"):
        model(ids, attention_mask=torch.full((2, 5), -10_000.0))
    for shape in ((2, 7), (3, 5)):
        with pytest.raises(hea.InputError, match=r"it must be \[batch, tokens\] = \[2, 5\]"):
            model(ids, attention_mask=torch.ones(shape))


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
