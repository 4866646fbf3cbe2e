"""Attention weights against those of transformers' BigBird, whose shape is that of ours."""

import pytest
import torch
from in_tree_models import in_tree, inputs_of

import hf_efficient_attn as hea


@pytest.mark.filterwarnings("ignore:Left behind", "ignore:Even with parity", "ignore:output_attentions")
@pytest.mark.parametrize("tokens", [64, 61])
def test_bigbird_in_training_mode(tokens: int) -> None:
    """In eval mode theirs do not sum to 1: of the copies of block 0 they show one."""
    theirs = in_tree("big_bird", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ours = hea.convert(theirs, parity=True)
    inputs = inputs_of("big_bird", "AutoModel", tokens)
    with torch.no_grad():
        found, expected = (each.train()(**inputs, output_attentions=True).attentions for each in (ours, theirs))
    assert [each.shape for each in found] == [(3, 4, tokens, tokens)] * 2
    for actual, other in zip(found, expected, strict=True):
        # theirs has the padding to blocks
        torch.testing.assert_close(actual, other[:, :, :tokens, :tokens], atol=1e-6, rtol=0)
