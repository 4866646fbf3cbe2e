"""Families of encoders alone, and libraries of models that write texts."""

from pathlib import Path

import pytest
import torch
import transformers
from families import ENCODER_DECODERS, ENCODERS, READERS
from models_cases import TINY, random_ids
from neighbours.saved_models import save_model


@pytest.mark.parametrize("family", ENCODERS)
def test_what_writes_texts_is_no_encoder(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, READERS[family])
    with pytest.raises(ValueError, match="AutoModel"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", [family for family in READERS if family not in ENCODER_DECODERS])
def test_encoders_stand_before_a_decoder_of_transformers(family: str) -> None:
    """Which asks the config how wide their last hidden state is."""
    shared = {name: TINY[name] for name in ("vocab_size", "intermediate_size", "num_hidden_layers")}
    config = transformers.BertConfig(
        **shared, hidden_size=24, num_attention_heads=2, is_decoder=True, add_cross_attention=True
    )
    encoder = READERS[family].model("AutoModel")
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=transformers.BertLMHeadModel(config)).eval()
    ids = random_ids(2, 12)
    out = model(input_ids=ids, decoder_input_ids=ids[:, :5])
    out.logits.sum().backward()
    assert out.logits.shape == (2, 5, TINY["vocab_size"])
    torch.testing.assert_close(out.encoder_last_hidden_state, encoder(ids).last_hidden_state)
    assert any(each.grad is not None and each.grad.any() for each in encoder.parameters())
