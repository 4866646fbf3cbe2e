"""The attention of ETC against its formula and plain attention, by tiles, and in compiled models."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from models.etc_transformer.dense_etc import Text, chunked, dense_etc
from models.etc_transformer.tiny_models import build, random_ids
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.models.etc_transformer import attention
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
    for name in ("global_input_ids", "global_mask", "global_contexts", "global_attends_to_all"):
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
        inputs["global_attends_to_all"][row, [*text.attends_to_all]] = 1
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
    assert f"{128 * (128 + 2 * tokens):,} pairs with 128 global tokens" in explained.to_text(400)
    blocks = hea.patterns.Pattern.from_dict(hea.EtcTransformerConfig.bigbird_etc_base().attention_pattern)
    assert blocks.num_pairs(84 * 40, 84 * 40) == 84**2 * (3 * 40 - 2)


@pytest.mark.parametrize(("preset", "millions"), [("etc_base", (166, 109)), ("etc_large", (558, 356))])
def test_presets_have_the_parameters_of_the_paper(preset: str, millions: tuple[int, int]) -> None:
    """166 and 109 million are the paper's numbers; those of the large model follow from its sizes."""
    for share, expected in zip((False, True), millions, strict=True):
        with torch.device("meta"):
            model = hea.EtcTransformerModel(getattr(hea.EtcTransformerConfig, preset)(share_projections=share))
        assert round(model.num_parameters() / 1e6) == expected


# every query a tile of its own, in the second case but for a last one
TILES = (1, 700)
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 30}
FIELDS = {**SIZES, "local_radius": 2, "chunk_tokens": 4, "pad_token_id": 0, "max_relative_distance": 3}


def computed(**options: Any) -> list[torch.Tensor]:
    """Return the outputs of a model in float64, weights included, and the gradients of all its parameters."""
    torch.manual_seed(0)
    model = hea.EtcTransformerModel(hea.EtcTransformerConfig(**FIELDS)).double().eval()
    ids, mask = torch.randint(1, 30, (2, 37)), torch.ones(2, 37, dtype=torch.long)
    mask[0, :9] = 0
    out = model(ids, attention_mask=mask, **options)
    ((out.last_hidden_state * mask.unsqueeze(-1)).pow(3).sum() + out.global_hidden_state.pow(3).sum()).backward()
    weights = [*(out.attentions or ()), *(out.global_attentions or ())]
    assert len(weights) == 2 * len(options)
    found = [out.last_hidden_state * mask.unsqueeze(-1), out.global_hidden_state, *weights]
    return [*found, *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "options", [{}, {"output_global_attentions": True}, {"output_attentions": True, "output_global_attentions": True}]
)
def test_tiles_change_nothing(tile: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = computed(**options)
    monkeypatch.setattr(attention, "TILE_SCORES", tile)
    for each, other in zip(computed(**options), wanted, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_tiles_have_the_gradient_of_what_they_compute(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of outputs and log-sum-exps, with labels of both kinds; what dropout has left out stays out."""
    monkeypatch.setattr(attention, "TILE_SCORES", 20)
    torch.manual_seed(1)
    sizes = ((3, 2), (5, 2), (5, 2), (3, 4), (3, 2))
    states = [torch.randn(1, 2, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    labels = torch.randint(4, (1, 1, 3, 2)), torch.rand(1, 1, 3, 3) > 0.5
    allowed = torch.rand(1, 1, 3, 5) > 0.3
    allowed[:, :, 0] = False

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *of_labels: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        added = tuple(zip(of_labels, labels, strict=True))
        out, lse, _ = attention.attend_pairs(query, key, value, added, allowed, 0.5, dropout, False)
        return torch.cat((out, torch.where(allowed.any(-1), lse, 0.0).unsqueeze(-1)), -1)

    assert torch.autograd.gradcheck(attend, states)


POSITIONS = torch.tensor([[*range(9), *range(2), *range(10)], [*range(21)]])


def compiled(model: Any, backend: str = "eager") -> Any:
    torch.compiler.reset()
    return torch.compile(model, fullgraph=True, backend=backend)


def test_packed_documents_have_the_states_of_the_plain_model() -> None:
    model, ids = build(spare_chunks=1, num_hidden_layers=1).double(), random_ids(2, 21)
    found = []
    for each in (model, compiled(model, "aot_eager")):
        out = each(ids, position_ids=POSITIONS)
        (out.last_hidden_state.sin().sum() + out.global_hidden_state.cos().sum()).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        found.append((out.last_hidden_state, out.global_hidden_state, out.global_mask, out.global_documents, gradients))
    torch.testing.assert_close(found[1], found[0])
    assert found[1][1].shape == (2, 7, 32)


def test_rows_of_too_many_documents_are_refused() -> None:
    """The plain model gives them more global tokens."""
    model, ids = build(spare_chunks=0, num_hidden_layers=1), random_ids(2, 21)
    with torch.no_grad():
        assert model(ids, position_ids=POSITIONS).global_hidden_state.shape[1] == 7
        with pytest.raises(RuntimeError, match="spare_chunks"):
            compiled(model)(ids, position_ids=POSITIONS)


def test_a_class_of_what_may_be_several_documents_is_refused() -> None:
    model, ids = build("AutoModelForSequenceClassification", num_hidden_layers=1), random_ids(2, 21)
    with torch.no_grad(), pytest.raises(Exception, match="may mark packed documents"):
        compiled(model)(ids, position_ids=POSITIONS)


def test_no_scores_of_all_pairs_are_held() -> None:
    """The largest tensor of a training step's graphs; a score for each head, token and global token has more."""
    sizes: list[int] = []

    def measured(graph: Any, _: Any) -> Any:
        sizes.extend(each.meta["val"].numel() for each in graph.graph.nodes if hasattr(each.meta.get("val"), "numel"))
        return make_boxed_func(graph.forward)

    heads, tokens, chunk = 4, 512, 16
    model = build(num_hidden_layers=1, local_radius=4, chunk_tokens=chunk, num_attention_heads=heads).train()
    torch.compiler.reset()
    step = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=measured, bw_compiler=measured))
    found = step(random_ids(1, tokens), position_ids=(torch.arange(tokens) % 32)[None])
    found.last_hidden_state.sum().backward()
    num_global = found.global_hidden_state.shape[1]
    assert num_global == tokens // chunk + tokens // chunk // 4 + 8
    # which tokens a global token reads
    assert max(sizes) == num_global * (num_global + tokens)
