"""The attention of ETC against its formula, against plain attention, and in closed forms."""

from typing import Any

import pytest
import torch
from models.etc_transformer.dense_etc import Text, chunked, dense_etc
from models.etc_transformer.tiny_models import build, random_ids
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.models.etc_transformer.global_input import (
    GlobalInput,
    build_structure,
    labels_of_offsets,
    num_labels,
)
from hf_efficient_attn.patterns import Band, Dilated, PerHead

SHARED = {"share_qkv_projections": True, "share_output_projection": True}
FORMS: dict[str, dict[str, Any]] = {
    "base": {},
    "shared": SHARED,
    "keys by query": {"share_kv_projections": True, "share_feed_forward": False},
    "pre-norm": {"norm_position": "pre", "hard_global_to_long": True},
    "hard both ways": {"hard_global_to_long": True, "hard_long_to_global": True},
    "no labels": {"relative_vocab_size": None, "type_vocab_size": 0},
    "other pattern": {"attention_pattern": PerHead([Band(2, 1), Dilated(4, 4, 2)])},
    "random blocks": {
        "attention_pattern": hea.EtcTransformerConfig.bigbird_etc_base(2, num_random_blocks=1).attention_pattern
    },
    "wide band": {"local_radius": 30, "max_relative_distance": 12, "relative_vocab_size": 28},
    "no band": {"local_radius": 0, "max_relative_distance": 0, "relative_vocab_size": 4},
}


@pytest.mark.parametrize("form", FORMS)
def test_states_and_gradients_are_those_of_the_formula(form: str) -> None:
    """Chunks of the text as global tokens; 9 tokens are no multiple of the chunks, nor of anything else."""
    model = build(num_hidden_layers=1, num_attention_heads=2, **FORMS[form]).double()
    ids = random_ids(1, 9)
    found = model(ids)
    expected = dense_etc(model, chunked(ids[0].tolist(), model.config))
    gradients = []
    for states in ((found.last_hidden_state[0], found.global_hidden_state[0]), expected):
        total = states[0].sin().sum() + states[1].cos().sum()
        gradients.append(torch.autograd.grad(total, tuple(model.parameters())))
    torch.testing.assert_close((found.last_hidden_state[0], found.global_hidden_state[0]), expected)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-7)


def test_other_implementations_train() -> None:
    """sdpa and eager; flex has no backward pass on CPUs, and trains on CUDA."""
    ids, mask, gradients = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long), {}
    mask[0, :3] = 0
    for name in ("efficient", "sdpa", "eager", "flex_attention"):
        model = build(num_hidden_layers=1).double() if name != "flex_attention" else build(num_hidden_layers=1)
        model.set_attn_implementation(name)
        if name == "flex_attention":
            with pytest.raises(hea.UnsupportedBackendError, match="flex has no backward pass on cpu"):
                model(ids, mask)
            continue
        found = model(ids, mask)
        total = found.last_hidden_state[mask.bool()].sin().sum() + found.global_hidden_state.cos().sum()
        gradients[name] = torch.autograd.grad(total, tuple(model.parameters()))
    torch.testing.assert_close(gradients["sdpa"], gradients["efficient"])
    torch.testing.assert_close(gradients["eager"], gradients["efficient"])


@pytest.mark.parametrize("side", ["left", "right"])
def test_given_structure_is_that_of_the_formula(side: str) -> None:
    """Two levels of links, contexts, and a global token that reads all; two texts, of which one is padded."""
    model = build(num_hidden_layers=1, num_attention_heads=2, hard_global_to_long=True).double()
    texts = [
        Text([5, 6, 7, 8, 9, 10, 11], [1, 4, 1, 1], [{0, 1}, {0, 1}, {0}, {2, 1}, {2}, {0}, {3}], [0, 0, 1, 1], {3}),
        Text([12, 13, 14, 15], [4, 1], [{0}, {1}, set(), {0, 1}], [0, 1]),
    ]
    tokens, num_global = 7, 4
    inputs = {name: torch.zeros(2, tokens, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    inputs["long_to_global"] = torch.full((2, tokens, 2), -1)
    for name in ("global_input_ids", "global_mask", "global_contexts", "global_reads_all"):
        inputs[name] = torch.zeros(2, num_global, dtype=torch.long)
    places = []
    for row, text in enumerate(texts):
        start = tokens - len(text.ids) if side == "left" else 0
        places.append(slice(start, start + len(text.ids)))
        inputs["input_ids"][row, places[row]] = torch.tensor(text.ids)
        inputs["attention_mask"][row, places[row]] = 1
        for token, numbers in enumerate(text.links):
            for level, number in enumerate(sorted(numbers)):
                inputs["long_to_global"][row, start + token, level] = number
        own = slice(0, len(text.global_ids))
        inputs["global_input_ids"][row, own], inputs["global_mask"][row, own] = torch.tensor(text.global_ids), 1
        inputs["global_contexts"][row, own] = torch.tensor(text.contexts)
        inputs["global_reads_all"][row, [*text.reads_all]] = 1
    with torch.no_grad():
        found = model(**inputs)
        for row, text in enumerate(texts):
            long, globals_ = dense_etc(model, text)
            torch.testing.assert_close(found.last_hidden_state[row, places[row]], long)
            torch.testing.assert_close(found.global_hidden_state[row, : len(text.global_ids)], globals_)


@pytest.mark.parametrize("radius", [12, 40])
def test_without_labels_and_with_one_set_of_maps_it_is_plain_attention(radius: int) -> None:
    """The authors' own identity: a radius as long as the text, of long and global tokens together."""
    config = build(local_radius=radius, relative_vocab_size=None, **SHARED).config
    model = hea.EtcTransformerModel(config).double().eval()
    attention = model.layers[0].self_attn
    long, globals_ = (torch.randn(2, size, 32, dtype=torch.float64) for size in (12, 3))
    chunks = GlobalInput(torch.ones(2, 3, dtype=torch.bool), torch.full((2, 12, 1), -1))
    with torch.no_grad():
        out, _, global_out, _ = attention(long, globals_, build_structure(config, chunks, None, None), NO_MASK)
        joined, side = torch.cat((long, globals_), 1), attention.long_side
        states = [side.heads(project(joined)) for project in (side.q_proj, side.k_proj, side.v_proj)]
        expected = attention.o_proj(scaled_dot_product_attention(*states).transpose(1, 2).flatten(2))
    torch.testing.assert_close(torch.cat((out, global_out), 1), expected)


def test_labels_are_in_the_order_of_the_authors() -> None:
    """The values of their docstrings."""
    row = torch.arange(6) - 2
    assert labels_of_offsets(row, 3).tolist() == [5, 4, 0, 1, 2, 3]
    assert labels_of_offsets(torch.arange(-5, 6), 3).tolist() == [6, 6, 6, 5, 4, 0, 1, 2, 3, 3, 3]
    assert num_labels(12) == 28


# which are warned of once
@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize(("tokens", "radius", "chunk"), [(23, 3, 4), (8, 3, 8), (30, 7, 5)])
def test_scores_are_as_many_as_the_paper_says(tokens: int, radius: int, chunk: int) -> None:
    """n_g² + 2 · n_g · n + n · (2r + 1) − r · (r + 1): every allowed pair has a weight, and no other one."""
    model = build(num_hidden_layers=1, local_radius=radius, chunk_tokens=chunk)
    with torch.no_grad():
        found = model(random_ids(1, tokens), output_attentions=True, output_global_attentions=True)
    pairs = sum(int((each[0][0, 0] > 0).sum()) for each in (found.attentions, found.global_attentions))
    num_global = -(-tokens // chunk)
    band = tokens * (2 * radius + 1) - radius * (radius + 1)
    assert pairs == num_global**2 + 2 * num_global * tokens + band
    for weights in (found.attentions[0], found.global_attentions[0]):
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_pairs_of_the_published_sizes() -> None:
    """4,096 long tokens with 230 global ones, as for Natural Questions; and BigBird-ETC's blocks."""
    num_global, tokens, explained = 230, 4096, hea.explain(hea.EtcTransformerConfig.etc_base(), 4096)
    band = Band(84, 84).num_pairs(tokens, tokens)
    assert num_global**2 + 2 * num_global * tokens + band == 2_622_144
    assert f"{128 * (128 + 2 * tokens):,} pairs with global tokens: 128 of them" in str(explained)
    blocks = hea.patterns.Pattern.from_dict(hea.EtcTransformerConfig.bigbird_etc_base().attention_pattern)
    assert blocks.num_pairs(84 * 40, 84 * 40) == 84**2 * (3 * 40 - 2)


@pytest.mark.parametrize(("preset", "millions"), [("etc_base", (166, 109)), ("etc_large", (558, 356))])
def test_presets_have_the_parameters_of_the_paper(preset: str, millions: tuple[int, int]) -> None:
    """166 and 109 million are the paper's numbers; those of the large model follow from its sizes."""
    for share, expected in zip((False, True), millions, strict=True):
        with torch.device("meta"):
            model = hea.EtcTransformerModel(getattr(hea.EtcTransformerConfig, preset)(share_projections=share))
        assert round(model.num_parameters() / 1e6) == expected
