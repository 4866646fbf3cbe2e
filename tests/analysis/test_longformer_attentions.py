import pytest
import torch
from in_tree_models import in_tree, inputs_of

import hf_efficient_attn as hea
from hf_efficient_attn.analysis.longformer_attentions import longformer_attentions

WINDOWS = (8, 4)


@pytest.mark.filterwarnings("ignore:Left behind", "ignore:output_attentions")
@pytest.mark.parametrize("with_globals", [True, False])
@pytest.mark.parametrize("tokens", [64, 61])
def test_as_transformers_returns_them(tokens: int, with_globals: bool) -> None:
    """Different windows per layer, padding, and different numbers of global tokens, some within a window."""
    theirs = in_tree("longformer")
    inputs = inputs_of("longformer", "AutoModel", tokens, padded=9)
    marked = torch.zeros_like(inputs["input_ids"])
    if with_globals:
        marked[0, :3], marked[1, [0, 17, 19, 30]], marked[2, 5] = 1, 1, 1
    with torch.no_grad():
        expected = theirs(**inputs, global_attention_mask=marked, output_attentions=True)
        found = hea.convert(theirs)(**inputs, global_attention_mask=marked, output_attentions=True)
    is_token = inputs["attention_mask"].bool()
    for layer, window in enumerate(WINDOWS):
        local, of_globals = longformer_attentions(found.attentions[layer], window, marked)
        assert local.shape == expected.attentions[layer].shape
        rows = is_token[:, None, :, None]
        assert ((local - expected.attentions[layer]) * rows).abs().max() < 1e-6
        if not with_globals:
            assert of_globals is None
            assert getattr(expected, "global_attentions", None) is None
            continue
        # theirs has the padding to windows, and 1/T for global tokens that an example lacks
        theirs_global = expected.global_attentions[layer][:, :, :tokens]
        assert of_globals.shape == theirs_global.shape
        is_there = torch.arange(4) < marked.sum(1, keepdim=True)
        assert ((of_globals - theirs_global) * is_there[:, None, None]).abs().max() < 1e-6
        assert (of_globals * ~is_there[:, None, None]).abs().max() == 0


@pytest.mark.parametrize(
    ("shape", "window", "mask", "message"),
    [
        ((1, 2, 3, 4), 2, None, "must be \\[batch, heads, tokens, tokens\\]"),
        ((1, 2, 4, 4), 3, None, "attention_window=3"),
        ((1, 2, 4, 4), 2.0, None, "attention_window=2.0 must be an integer"),
        ((1, 2, 4, 4), 2, torch.ones(1, 3), r"\[batch, tokens\] = \[1, 4\]"),
    ],
)
def test_bad_input(shape: tuple, window: float, mask: torch.Tensor | None, message: str) -> None:
    with pytest.raises(hea.EfficientAttentionError, match=message):
        longformer_attentions(torch.rand(shape), window, mask)
