"""Presets have their shapes; graphs of any length; texts of rows, padding and documents."""

from typing import Any

import pytest
import torch
from models.compressed_transformer.tiny_models import build, random_ids
from models.shared_checks import check_exported
from models_cases import TINY, TOLERANCE, head_inputs

import hf_efficient_attn as hea
from hf_efficient_attn.models.mechanisms.sequences import sequences_of
from hf_efficient_attn.patterns import Band


@pytest.mark.parametrize(
    ("preset", "layers", "hidden", "inner"), [("linformer_base", 12, 768, 3072), ("linformer_large", 24, 1024, 4096)]
)
def test_presets_have_the_parameters_of_their_shapes(preset: str, layers: int, hidden: int, inner: int) -> None:
    """Those of RoBERTa, and one matrix of 512 × 128 = 65,536 numbers, or as many as the sharing mode has."""
    for sharing, maps in (("layerwise", 1), ("kv", layers), ("headwise", 2 * layers)):
        config = getattr(hea.CompressedTransformerConfig, preset)(projection_sharing=sharing)
        with torch.device("meta"):
            model = hea.CompressedTransformerModel(config)
        block = 4 * (hidden * hidden + hidden) + 2 * hidden * inner + hidden + inner + 4 * hidden
        embeddings = (50_265 + 514 + 2) * hidden
        expected = embeddings + layers * block + maps * 65_536
        assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize(
    ("preset", "vocabulary", "positions", "types", "kernels"),
    [("performer_base", 50_265, 514, 0, 0), ("nystromformer_base", 30_000, 4098, 2, 12 * 12 * 65)],
)
def test_presets_have_the_parameters_of_encoders_of_their_size(
    preset: str, vocabulary: int, positions: int, types: int, kernels: int
) -> None:
    """Those of BERT-base, and of convolutions; random features are no parameters."""
    with torch.device("meta"):
        model = hea.CompressedTransformerModel(getattr(hea.CompressedTransformerConfig, preset)())
    block = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    expected = (vocabulary + positions + types + 2) * 768 + 12 * block + kernels
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_linformer_is_an_alias_that_no_config_of_transformers_collides_with() -> None:
    config = hea.CompressedTransformerConfig.linformer(**TINY, projected_tokens=4)
    assert config.to_dict() == hea.CompressedTransformerConfig(**TINY, projected_tokens=4).to_dict()
    assert config.model_type == "compressed_transformer"
    with pytest.raises(TypeError, match="'mechanism'"):
        hea.CompressedTransformerConfig.linformer(mechanism="linear")


@pytest.mark.parametrize("tokens", [8, 10])
def test_positions_are_one_for_each_token(tokens: int) -> None:
    for positions in (torch.arange(tokens)[None], torch.arange(9), torch.arange(9).expand(3, -1)):
        with pytest.raises(hea.InputError, match=r"it must be \[2 or 1, 9\], one position for each new token"):
            build("AutoModel")(random_ids(2, 9), position_ids=positions)


@torch.no_grad()
def test_masked_tokens_between_others_keep_their_places_in_patterns_alone() -> None:
    """As the card says: sums over a text, and not patterns, are those of the text without them."""
    ids, mask = random_ids(1, 9), torch.ones(1, 9, dtype=torch.long)
    mask[0, 4] = 0
    for mechanism, is_without in (("linear", True), ("linformer", True), ("memory_compressed", True), ("prior", False)):
        model = build("AutoModel", mechanism=mechanism, position_embedding_type="none")
        found = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        assert torch.allclose(found, model(ids[mask.bool()][None]).last_hidden_state[0], atol=1e-5) == is_without


def test_layers_with_a_pattern_are_those_of_the_sparse_transformer() -> None:
    """And so a model of such layers alone is one."""
    model = build("AutoModel", mechanism="pattern", attention_pattern=Band(2, 1))
    sparse = hea.SparseTransformerModel(hea.SparseTransformerConfig(**TINY, attention_pattern=Band(2, 1))).eval()
    sparse.load_state_dict(model.state_dict())
    ids = random_ids(2, 9)
    torch.testing.assert_close(model(ids).last_hidden_state, sparse(ids).last_hidden_state)


CPU = torch.device("cpu")


def packed(lengths: list[int]) -> torch.Tensor:
    """Return the number of each token's document, [1, T]."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


@pytest.mark.parametrize("lengths", [[5, 1, 9], [1] * 40 + [100], [64] * 3 + [3] * 20 + [1]])
def test_documents_come_back_and_their_places_are_few(lengths: list[int]) -> None:
    documents = packed(lengths)
    tokens = documents.shape[1]
    states = torch.randn(1, tokens, 3)
    sequences = sequences_of(None, documents, 1, tokens, CPU)
    assert torch.equal(sequences.join(sequences.split(states)), states)
    assert sum(group.index.numel() for group in sequences.groups) <= 2 * tokens


def test_contents_of_padding_change_nothing_and_get_no_gradient() -> None:
    model, ids, mask = build("AutoModel"), random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = mask[1, :2] = mask[1, 4] = 0
    found = []
    for content in (0.0, 50.0, torch.nan):
        embedded = model.embed_tokens(ids).detach()
        embedded[mask == 0] = content
        states = model(inputs_embeds=embedded.requires_grad_(), attention_mask=mask).last_hidden_state[mask.bool()]
        states.sin().sum().backward()
        # of a token that is not a number, gradients of its own are not, either
        assert content != content or embedded.grad[mask == 0].count_nonzero() == 0
        found.append(states)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize("fields", [{"mechanism": "nystrom", "num_landmarks": 3}, {"mechanism": "linear"}])
@torch.no_grad()
def test_weights_of_tokens_are_where_these_are(fields: dict[str, Any]) -> None:
    """With padding before a text and within it, and in packed documents."""
    model, ids = build("AutoModel", position_embedding_type="none", **fields), random_ids(1, 7)
    alone = model(ids, output_attentions=True).attentions[0]
    places = torch.tensor([1, 2, 4, 5, 6, 7, 9])
    mask = torch.zeros(1, 10, dtype=torch.long)
    mask[0, places] = 1
    padded = torch.zeros_like(mask)
    padded[0, places] = ids[0]
    found = model(padded, attention_mask=mask, output_attentions=True).attentions[0]
    expected = torch.zeros(1, 4, 10, 10)
    expected[:, :, places[:, None], places] = alone
    torch.testing.assert_close(found * mask[:, None, :, None], expected, atol=TOLERANCE, rtol=TOLERANCE)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = model(torch.cat((random_ids(1, 5), ids), 1), position_ids=positions, output_attentions=True).attentions[0]
    torch.testing.assert_close(packed[:, :, 5:, 5:], alone, atol=TOLERANCE, rtol=TOLERANCE)
    assert packed[:, :, 5:, :5].count_nonzero() == packed[:, :, :5, 5:].count_nonzero() == 0


def test_what_no_layer_could_compute_is_refused() -> None:
    model, ids = build("AutoModel"), random_ids(1, 6)
    with pytest.raises(hea.InputError, match="other pairs of tokens than a padding mask"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6).tril().bool())
    inputs = {"input_ids": ids, "position_ids": torch.arange(6)[None]}
    with pytest.raises(hea.InputError, match="compiled or exported"):
        torch.export.export(model, (), inputs, strict=False)


MEMORY: dict[str, Any] = {"mechanism": "memory_compressed"}
# strides of 8 tokens
LINFORMER: dict[str, Any] = {"projected_tokens": 8, "projection_bias": True, "projection_type": "convolution"}


@pytest.mark.parametrize(
    ("fields", "has_any_batch"),
    [
        # the contract exports a causal one
        pytest.param(
            {**MEMORY, "compression_tokens": 4, "compression_by_head": False, "compression_null_key": True},
            False,
            marks=pytest.mark.thorough,
        ),
        pytest.param({**LINFORMER, "projection_sharing": "none"}, True, marks=pytest.mark.thorough),
        ({"projected_tokens": 8, "projection_type": "mean", "projection_first": True}, True),
    ],
)
def test_an_exported_model_computes_any_length(fields: dict[str, Any], has_any_batch: bool) -> None:
    model = build(num_hidden_layers=1, use_cache=False, **fields)
    head = "AutoModelForCausalLM" if model.config.is_causal else "AutoModelForMaskedLM"
    rows = (3, 1) if has_any_batch else (1, 1)

    def inputs(rows: int, tokens: int) -> dict[str, torch.Tensor]:
        return head_inputs(head, rows, tokens)

    dims = {1: torch.export.Dim("tokens", min=5, max=64)}
    if has_any_batch:
        dims[0] = torch.export.Dim("batch", min=1, max=64)
    shapes = dict.fromkeys(inputs(1, 5), dims)
    check_exported(model, inputs, shapes, [(rows[0], 12), (rows[0], 6), (rows[1], 8), (rows[1], 64)])
