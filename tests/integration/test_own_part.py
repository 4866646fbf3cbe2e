"""The encoder or the decoder alone of a saved encoder-decoder follows the patterns of that part."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import SEQ2SEQ, token_ids

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

# of unequal length, which the fields of the other part do not say
ENCODER, DECODER = [Band(2, 2), None, Band(1, 1)], [Band(3, 0), Band(1, 0)]
PATTERNS = {"encoder": ENCODER, "decoder": DECODER}
T5 = {**SEQ2SEQ, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64}
BART = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in
        (("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "t5": lambda: tr.T5Config(**T5),
    "mt5": lambda: tr.MT5Config(**T5),
    # its encoder alone has a config of its own, beside one that says it is an encoder-decoder
    "umt5": lambda: tr.UMT5Config(**T5),
    "bart": lambda: tr.BartConfig(**SEQ2SEQ, **BART, encoder_layers=3, decoder_layers=2),
}
ENCODER_HEADS = ("AutoModelForTextEncoding", "AutoModelForTokenClassification")


def whole(name: str, pattern: Any) -> Any:
    """Return an encoder-decoder with weights large enough for attention to matter."""
    torch.manual_seed(0)
    model = tr.AutoModelForSeq2SeqLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return hea.sparsify(model, pattern)


@torch.no_grad()
def encoded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, output_hidden_states=True).hidden_states[-1]


@pytest.mark.parametrize("head", ENCODER_HEADS)
@pytest.mark.parametrize("name", ["t5", "mt5", "umt5"])
def test_an_encoder_alone_follows_the_patterns_of_the_encoder(name: str, head: str, tmp_path: Path) -> None:
    model, ids = whole(name, PATTERNS), token_ids(2, 14)
    model.save_pretrained(tmp_path / "whole")
    expected = encoded(model.get_encoder(), ids)
    alone = getattr(tr, head).from_pretrained(tmp_path / "whole").eval()
    assert "bidirectional, attention_pattern" in hea.explain(alone, 14).to_text(200)
    torch.testing.assert_close(encoded(alone, ids), expected)
    assert len(alone.config.attention_pattern) == len(ENCODER)
    alone.save_pretrained(tmp_path / "alone")
    again = getattr(tr, head).from_pretrained(tmp_path / "alone").eval()
    torch.testing.assert_close(encoded(again, ids), expected)
    dense = hea.sparsify(model, None).get_encoder()
    assert (encoded(dense, ids) - expected).abs().max() > 0.1


@torch.no_grad()
def test_a_decoder_alone_follows_the_patterns_of_the_decoder(tmp_path: Path) -> None:
    ids = token_ids(2, 14)
    whole("bart", PATTERNS).save_pretrained(tmp_path / "whole")
    alone = tr.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    assert "layer 0 of 2 with attention, causal, attention_pattern" in hea.explain(alone, 14).to_text(200)
    found = alone(ids).logits
    # the same weights, given the pattern as a decoder
    own = tr.BartForCausalLM(CONFIGS["bart"]()).eval()
    own.load_state_dict(alone.state_dict())
    dense = own(ids).logits
    torch.testing.assert_close(found, hea.sparsify(own, DECODER)(ids).logits)
    assert (dense - found).abs().max() > 0.1
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(alone.generate(ids, **options), own.generate(ids, **options))


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_an_encoder_without_patterns_keeps_its_own_attention(name: str, tmp_path: Path) -> None:
    model, ids = whole(name, {"decoder": Band(3, 0)}), token_ids(2, 14)
    model.save_pretrained(tmp_path)
    alone = tr.AutoModelForTextEncoding.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(encoded(alone, ids), encoded(model.get_encoder(), ids))
    assert getattr(alone.config, "attention_pattern", None) is None


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_parts_of_unequal_length_are_loaded_whole(name: str, tmp_path: Path) -> None:
    model, ids = whole(name, PATTERNS), token_ids(2, 14)
    model.save_pretrained(tmp_path)
    again = tr.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits)
    assert again.config.attention_pattern == model.config.attention_pattern


def test_patterns_by_part_are_refused_where_there_are_no_parts() -> None:
    model = tr.LlamaForCausalLM(tr.LlamaConfig(hidden_size=16, num_attention_heads=2, intermediate_size=16))
    hea.sparsify(model, Band(2, 0))
    model.config.attention_pattern = {"encoder": Band(2, 0).to_dict(), "decoder": None}
    with pytest.raises(hea.ConfigurationError, match="LlamaConfig"):
        model(token_ids(1, 4))
