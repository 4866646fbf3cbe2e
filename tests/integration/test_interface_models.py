"""Real models of transformers on the attention implementation "efficient", against their own on sdpa."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import CAUSAL, CONFIGS, PATTERN, SEQ2SEQS, SPARSE, build, inputs_of, matrix, outputs_of, token_ids
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, Causal, Full, Pattern

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
SIDES = ("none", "left", "right")


def sides_of(name: str) -> tuple[str, ...]:
    return SIDES if name != "vit" else ("none",)


# sides take turns, and every model has one; all of all are thorough
CASES, SPARSE_CASES = (
    [
        pytest.param(name, side, marks=[pytest.mark.thorough] * (side != sides_of(name)[number % len(sides_of(name))]))
        for number, name in enumerate(names)
        for side in sides_of(name)
    ]
    for names in (CONFIGS, SPARSE)
)


@pytest.mark.parametrize(("name", "side"), CASES)
def test_without_pattern_it_is_the_models_own_attention(name: str, side: str) -> None:
    inputs = inputs_of(name, side)
    expected = outputs_of(build(name), inputs)
    actual = outputs_of(build(name, attn_implementation="efficient"), inputs)
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize(("name", "side"), SPARSE_CASES)
def test_full_or_causal_pattern_is_the_models_own_attention(name: str, side: str) -> None:
    model, inputs = build(name), inputs_of(name, side)
    expected = outputs_of(model, inputs)
    for pattern in (Full(), Causal()) if name in CAUSAL else (Full(),):
        hea.sparsify(model, pattern)
        torch.testing.assert_close(outputs_of(model, inputs), expected, **TOLERANCE)


def with_matrix(name: str, pattern: Pattern, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Return inputs in which a matrix says what the pattern says."""
    allowed: Any = matrix(pattern.causal() if name in CAUSAL else pattern, inputs["attention_mask"])
    if name == "gemma3":
        allowed = {"full_attention": allowed, "sliding_attention": matrix(Band(4, 0), inputs["attention_mask"])}
    if name == "modernbert":
        allowed = {"full_attention": allowed, "sliding_attention": matrix(Band(3, 3), inputs["attention_mask"])}
    return {**inputs, "attention_mask": allowed}


@pytest.mark.parametrize(("name", "side"), [case for case in SPARSE_CASES if case.values[0] not in ("vit", *SEQ2SEQS)])
def test_pattern_is_the_dense_mask_on_sdpa(name: str, side: str) -> None:
    model, inputs = build(name), inputs_of(name, side)
    with torch.no_grad():
        expected = model(**with_matrix(name, PATTERN, inputs)).logits[inputs["attention_mask"].bool()]
    own = outputs_of(model, inputs)
    hea.sparsify(model, PATTERN)
    for backend in ("blocked", "sdpa"):
        with hea.use_backend(backend):
            actual = outputs_of(model, inputs)
        torch.testing.assert_close(actual, expected, **TOLERANCE)
        assert (actual - own).abs().max() > 0.1


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", SEQ2SEQS)
def test_pattern_of_an_encoder_decoder_is_for_its_encoder(name: str, side: str) -> None:
    model, inputs = build(name), inputs_of(name, side)
    encoder, ids, mask = model.get_encoder(), inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        expected = encoder(ids, attention_mask=matrix(PATTERN, mask)).last_hidden_state
        logits = model(**{**inputs, "encoder_outputs": (expected,)}).logits
        hea.sparsify(model, PATTERN)
        actual = encoder(ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], **TOLERANCE)
        torch.testing.assert_close(model(**inputs).logits, logits, **TOLERANCE)


def test_pattern_of_the_decoder_of_an_encoder_decoder() -> None:
    for name in SEQ2SEQS:
        model, inputs = build(name), inputs_of(name, "right")
        with torch.no_grad():
            allowed = matrix(PATTERN.causal(), torch.ones_like(inputs["decoder_input_ids"]))
            expected = model(**inputs, decoder_attention_mask=allowed).logits
            hea.sparsify(model, {"decoder": PATTERN})
            torch.testing.assert_close(model(**inputs).logits, expected, **TOLERANCE)


def test_pattern_over_the_patches_of_a_picture() -> None:
    model, inputs = build("vit"), inputs_of("vit", "none")
    hea.sparsify(model, PATTERN)
    with hea.use_backend("reference"):
        expected = outputs_of(model, inputs)
    with hea.use_backend("blocked"):
        torch.testing.assert_close(outputs_of(model, inputs), expected, **TOLERANCE)


@pytest.mark.parametrize("name", SPARSE)
def test_saved_model_follows_its_pattern_again(name: str, tmp_path: Path) -> None:
    model, inputs = hea.sparsify(build(name), PATTERN), inputs_of(name, "none")
    expected = outputs_of(model, inputs)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert again.config._attn_implementation == "efficient"
    torch.testing.assert_close(outputs_of(again, inputs), expected, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:output_attentions")
@pytest.mark.parametrize("name", ["llama", "gemma3", "bert", "modernbert", "bart", "t5"])
def test_output_attentions_are_those_of_eager(name: str) -> None:
    inputs = inputs_of(name, "right")
    with torch.no_grad():
        expected = build(name, attn_implementation="eager")(**inputs, output_attentions=True)
        actual = build(name, attn_implementation="efficient")(**inputs, output_attentions=True)
    fields = ["encoder_attentions", "decoder_attentions", "cross_attentions"] if name in SEQ2SEQS else ["attentions"]
    for field in fields:
        assert len(expected[field]) == 2
        for ours, theirs in zip(actual[field], expected[field], strict=True):
            # queries that are padding are not computed
            is_decoder = field in ("decoder_attentions", "cross_attentions")
            rows = 1 if is_decoder else inputs["attention_mask"][:, None, :, None]
            torch.testing.assert_close(ours * rows, theirs * rows, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:output_attentions")
def test_output_attentions_show_the_pattern() -> None:
    model, inputs = hea.sparsify(build("bert"), PATTERN), inputs_of("bert", "none")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    allowed = matrix(PATTERN, inputs["attention_mask"]).expand(2, 4, -1, -1)
    for layer in weights:
        assert torch.equal(layer > 0, allowed)
        torch.testing.assert_close(layer.sum(-1), torch.ones(2, 4, 14))


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("bert", "gemma3", "t5"))]
)
def test_compiles_without_breaks(name: str) -> None:
    torch._dynamo.reset()
    model = build(name)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for pattern in (PATTERN, Band(1, 1)):
        hea.sparsify(model, pattern)
        # torch 2.11 cannot trace how transformers makes the cache of an encoder-decoder
        inputs: dict[str, Any] = {**inputs_of(name, "left", tokens=150), "use_cache": name not in SEQ2SEQS}
        torch.testing.assert_close(outputs_of(compiled, inputs), outputs_of(model, inputs), **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("llama", "left"),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in (
                ("modernbert", "right"),
                ("llama", "none"),
                ("bert", "none"),
                ("gemma3", "right"),
                ("t5", "right"),
            )
        ),
    ],
)
def test_exports_with_any_batch_and_length(name: str, side: str) -> None:
    """side "none": without a mask. From two tokens on, as transformers' own masks."""
    model = hea.sparsify(build(name), PATTERN)
    # T5 copies its config for each part; a program can return no cache of two parts
    for part in (module for module in model.modules() if isinstance(module, tr.PreTrainedModel)):
        part.config.use_cache = False

    def inputs(rows: int, tokens: int) -> dict[str, Tensor]:
        found = {key: given.repeat(2, 1)[:rows] for key, given in inputs_of(name, side, tokens).items()}
        return {key: given for key, given in found.items() if key != "attention_mask" or side != "none"}

    sizes = {
        dim: torch.export.Dim(dim, min=least, max=200) for dim, least in (("batch", 1), ("tokens", 2), ("target", 3))
    }
    example = inputs(2, 14)
    shapes = {key: {0: sizes["batch"], 1: sizes["target" if "decoder" in key else "tokens"]} for key in example}
    program = torch.export.export(model, (), example, dynamic_shapes=shapes).module()
    for rows, tokens in ((3, 150), (1, 9), (2, 2)):
        other = inputs(rows, tokens)
        torch.testing.assert_close(outputs_of(program, other), outputs_of(model, other), **TOLERANCE)


def test_modules_that_do_not_know_their_layer_follow_one_pattern_only() -> None:
    with pytest.raises(hea.ConfigurationError, match="no layer_idx"):
        hea.sparsify(build("vit"), [PATTERN, None])


MOONSHINE = {f"{part}_{name}": count for part in ("encoder", "decoder") for name, count in
             (("num_hidden_layers", 2), ("num_attention_heads", 4), ("num_key_value_heads", 4))}  # fmt: skip


@pytest.mark.parametrize("part", ["encoder", "decoder"])
@torch.no_grad()
def test_a_decoder_is_known_by_its_place_where_its_modules_do_not_say(part: str) -> None:
    """Modules of Moonshine have no is_decoder: they took the pattern of the encoder, as did cross-attention."""
    fields = {**MOONSHINE, "encoder_num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64}
    config = tr.MoonshineConfig(**fields, vocab_size=61, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    model = tr.MoonshineForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.2)
    waves = torch.randn(2, 16 * 384)
    encoded = model.get_encoder()(waves)
    # cross-attention has as many queries as keys
    inputs = {"encoder_outputs": encoded, "decoder_input_ids": token_ids(2, encoded[0].shape[1])}
    own = model(**inputs).logits
    hea.sparsify(model, {part: Band(1, 0)})
    again = model.get_encoder()(waves)[0]
    assert torch.allclose(again, encoded[0], atol=1e-5) is (part == "decoder")
    mask = Band(1, 0).allowed(torch.arange(own.shape[1])[:, None], torch.arange(own.shape[1]))
    sparse = model(**inputs).logits
    hea.sparsify(model, None)
    matrix = mask.expand(2, 1, -1, -1) if part == "decoder" else None
    expected = own if matrix is None else model(**inputs, decoder_attention_mask=matrix).logits
    torch.testing.assert_close(sparse, expected, **TOLERANCE)


def test_layers_beyond_those_of_the_config_are_refused() -> None:
    model = hea.sparsify(build("llama"), PATTERN)
    model.model.layers[1].self_attn.layer_idx = 2
    with pytest.raises(hea.ConfigurationError, match="is layer 2 of its encoder, but .* there are 2 layers"):
        model(token_ids(1, 4), use_cache=False)
