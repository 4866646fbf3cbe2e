"""A model of transformers that `sparsify` has given a pattern keeps it as one of ours, or is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attention_models import BART, SEQ2SEQ, TINY
from transformers import (
    AutoModel,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, GlobalTokens, PerHead, RandomBlocks

pytestmark = pytest.mark.filterwarnings("ignore:Even with parity", "ignore:Left out")
BAND, TOKENS = Band(4, 4), 40
TILE = {"tile": "AB", "patterns": {"A": None, "B": BAND}}


def bert() -> Any:
    return BertForMaskedLM(BertConfig(**{**TINY, "max_position_embeddings": 64}))


def modernbert() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    ids = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertForMaskedLM(ModernBertConfig(**TINY, **ids, layer_types=kinds, local_attention=6))


def bart() -> Any:
    return BartForConditionalGeneration(BartConfig(**SEQ2SEQ, **BART, max_position_embeddings=64, bos_token_id=1))


SOURCES = {
    "band": (bert, BAND),
    "global tokens": (bert, BAND | GlobalTokens([0, 7])),
    "random blocks": (bert, BAND | RandomBlocks(1, 4, seed=3)),
    "heads": (bert, PerHead([Band(2, 2), Band(9, 0), BAND, Band(0, 9)])),
    "layers": (bert, [None, BAND]),
    "tile": (bert, TILE),
    "sliding layers": (modernbert, BAND),
    "encoder": (bart, BAND),
    "encoder and decoder": (bart, {"encoder": [BAND, None], "decoder": Band(3, 0)}),
    "decoder": (bart, {"encoder": None, "decoder": Band(3, 0)}),
}


def sparsified(name: str) -> Any:
    """Return a model in float64, with weights large enough for attention to matter."""
    torch.manual_seed(0)
    build, pattern = SOURCES[name]
    model = build().double().eval()
    for matrix in (each for each in model.parameters() if each.ndim > 1):
        torch.nn.init.normal_(matrix, std=0.2)
    return hea.sparsify(model, pattern)


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    ids = torch.randint(3, 61, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    decoded = {"decoder_input_ids": ids[:, :20]} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **decoded).logits


@pytest.mark.parametrize("name", SOURCES)
def test_pattern_and_length_are_kept(name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    source = sparsified(name)
    expected = logits_of(source)
    model = hea.convert(source, tmp_path / "ours", parity=True)
    # rotations of ModernBERT are in float32
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-6 if name == "sliding layers" else 1e-10)
    assert model.config.max_position_embeddings == source.config.max_position_embeddings
    assert not [each for each in recwarn if "pattern" in str(each.message)]
    dense = logits_of(hea.sparsify(source, None))
    assert not torch.allclose(expected, dense, atol=1e-3)


def test_folder_is_converted_alike_and_made_longer(tmp_path: Path) -> None:
    source = sparsified("global tokens")
    source.save_pretrained(tmp_path / "source")
    model = hea.convert(tmp_path / "source", tmp_path / "ours", max_position_embeddings=256)
    torch.testing.assert_close(logits_of(model), logits_of(source), rtol=0, atol=1e-10)
    assert model.config.attention_pattern == source.config.attention_pattern
    assert AutoModel.from_pretrained(tmp_path / "ours").config.max_position_embeddings == 256


@pytest.mark.parametrize("options", [{"pattern": "band(8, 8)"}, {"attention_window": 16}])
def test_another_pattern_that_is_asked_for_takes_its_place(options: dict[str, Any]) -> None:
    with (
        pytest.warns(UserWarning, match="attention_pattern=.* of the source is not kept"),
        pytest.warns(
            UserWarning, match="Outputs were not compared with the source's, because .* another (pattern|window)"
        ),
    ):
        model = hea.convert(sparsified("band"), parity=True, **options)
    assert model.config.attention_pattern == Band(8, 8).to_dict()


@pytest.mark.parametrize("to", ["etc_transformer", "compressed_transformer"])
def test_what_reads_otherwise_is_refused(to: str) -> None:
    message = rf"This BertConfig has attention_pattern=.*cannot be kept, because converting bert to {to}"
    with pytest.raises(hea.ConfigurationError, match=message):
        hea.convert(sparsified("band"), to=to)


@pytest.mark.filterwarnings("ignore:Copied from", "ignore:global_tokens")
def test_model_of_transformers_with_such_windows_is_made() -> None:
    assert hea.convert(sparsified("band"), to="longformer").config.attention_window == [8, 8]
    with pytest.raises(hea.ConfigurationError, match="attention_pattern"):
        hea.convert(sparsified("global tokens"), to="longformer")
