"""Encoder-decoders against torch.nn.Transformer and transformers' Marian, LED and BigBird-Pegasus, weights copied."""

from typing import Any

import pytest
import torch
import transformers
from models.sparse_seq2seq.in_tree_weights import (
    BIGBIRD_PEGASUS,
    LED,
    MARIAN,
    copy_in_tree,
    randomize_all,
    torch_transformer,
)
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.models.parts.embeddings import sinusoids

OURS = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 3,
}
THEIRS = {
    "vocab_size": 67,
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 3,
}


def batch(source_tokens: int = 14, target_tokens: int = 6, source_padding: int = 5) -> dict[str, Tensor]:
    """Return three examples, one with a source and one with a target padded on the right."""
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(3, 67, (3, source_tokens), generator=generator)
    target = torch.randint(3, 67, (3, target_tokens), generator=generator)
    mask, target_mask = torch.ones_like(source), torch.ones_like(target)
    mask[0, source_tokens - source_padding :], target_mask[1, -2:] = 0, 0
    return {
        "input_ids": source,
        "attention_mask": mask,
        "decoder_input_ids": target,
        "decoder_attention_mask": target_mask,
    }


def assert_same(ours: Tensor, theirs: Tensor, real: Tensor, tolerance: float) -> None:
    """Compare where there are tokens: on padding, implementations differ at will."""
    difference = (ours - theirs)[real.bool()].abs().max().item()
    assert difference <= tolerance, difference


def vanilla(**fields: Any) -> Any:
    model = hea.SparseSeq2SeqModel(hea.SparseSeq2SeqConfig.vanilla(**{**OURS, **fields}))
    return randomize_all(model).double().eval()


@pytest.mark.parametrize("kernel", ["efficient", "eager", "sdpa"])
def test_vanilla_is_torch_transformer(kernel: str) -> None:
    model = vanilla()
    # the formula's softmax is in float32, whatever the dtype
    model.set_attn_implementation(kernel)
    theirs, inputs = torch_transformer(model), batch()
    pad, target_pad = inputs["attention_mask"] == 0, inputs["decoder_attention_mask"] == 0
    amplified = [model.embed(inputs[name]) * 32**0.5 for name in ("input_ids", "decoder_input_ids")]
    source, target = (states + sinusoids(torch.arange(states.shape[1]), 32) for states in amplified)
    causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
    with torch.no_grad():
        expected = theirs(
            source,
            target,
            tgt_mask=causal,
            src_key_padding_mask=pad,
            tgt_key_padding_mask=target_pad,
            memory_key_padding_mask=pad,
        )
        actual = model(**inputs).last_hidden_state
    assert_same(actual, expected, ~target_pad, 1e-12)


def test_vanilla_is_marian_of_the_paper() -> None:
    config = transformers.MarianConfig(
        **THEIRS,
        activation_function="relu",
        scale_embedding=True,
        dropout=0.0,
        max_position_embeddings=20,
        pad_token_id=0,
        decoder_start_token_id=1,
    )
    theirs = randomize_all(transformers.MarianModel(config)).double().eval()
    model = vanilla(sinusoid_layout="halves")
    copy_in_tree(theirs, model, MARIAN)
    table = sinusoids(torch.arange(20), 32, "halves")
    for side in (theirs.encoder, theirs.decoder):
        # theirs are rounded from double; ours are computed in single precision
        side.embed_positions.weight.data = table.double()
    built = transformers.MarianModel(config).encoder.embed_positions.weight
    torch.testing.assert_close(table, built.detach(), atol=1e-6, rtol=0)
    inputs = batch()
    with torch.no_grad():
        expected, actual = theirs(**inputs), model(**inputs)
    real, target_real = inputs["attention_mask"], inputs["decoder_attention_mask"]
    assert_same(actual.encoder_last_hidden_state, expected.encoder_last_hidden_state, real, 1e-12)
    assert_same(actual.last_hidden_state, expected.last_hidden_state, target_real, 1e-12)


def led_config(**fields: Any) -> transformers.LEDConfig:
    return transformers.LEDConfig(
        **THEIRS,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=40,
        attention_window=[4, 8],
        dropout=0.0,
        **fields,
    )


def led_ours(model_class: Any, **fields: Any) -> Any:
    preset = {"attention_window": [4, 8], "max_position_embeddings": 64, "max_target_position_embeddings": 40}
    return model_class(hea.SparseSeq2SeqConfig.led(**preset, **OURS, **fields)).eval()


def global_masks(inputs: dict[str, Tensor]) -> list[Tensor]:
    first = torch.zeros_like(inputs["input_ids"])
    first[:, 0] = 1
    uneven = torch.zeros_like(first)
    uneven[0, :2], uneven[1, [0, 5, 9]], uneven[2, 7] = 1, 1, 1
    return [first, uneven]


@pytest.mark.parametrize("kernel", ["efficient", "eager", "sdpa"])
def test_led_for_conditional_generation(kernel: str) -> None:
    theirs = randomize_all(transformers.LEDForConditionalGeneration(led_config())).eval()
    model = led_ours(hea.SparseSeq2SeqForConditionalGeneration)
    copy_in_tree(theirs, model, LED)
    model.set_attn_implementation(kernel)
    inputs = batch(33)
    for mask in global_masks(inputs):
        with torch.no_grad():
            expected, actual = (each(**inputs, global_attention_mask=mask).logits for each in (theirs, model))
        assert_same(actual, expected, inputs["decoder_attention_mask"], 1e-5)


def test_led_generates_the_same_with_no_mask_from_the_caller() -> None:
    theirs = randomize_all(transformers.LEDForConditionalGeneration(led_config())).eval()
    model = led_ours(hea.SparseSeq2SeqForConditionalGeneration)
    copy_in_tree(theirs, model, LED)
    inputs = {name: tensor for name, tensor in batch(33).items() if not name.startswith("decoder")}
    options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False}
    expected = theirs.generate(**inputs, global_attention_mask=global_masks(inputs)[0], **options)
    assert torch.equal(model.generate(**inputs, **options), expected)


def test_led_question_answering() -> None:
    theirs = randomize_all(transformers.LEDForQuestionAnswering(led_config())).eval()
    model = led_ours(hea.SparseSeq2SeqForQuestionAnswering)
    copy_in_tree(theirs, model, LED)
    inputs = {name: tensor for name, tensor in batch(21).items() if not name.startswith("decoder")}
    mask = global_masks(inputs)[1]
    with torch.no_grad():
        expected, actual = (each(**inputs, global_attention_mask=mask) for each in (theirs, model))
    for name in ("start_logits", "end_logits"):
        assert_same(actual[name], expected[name], inputs["attention_mask"], 1e-5)


def sparse_config(**fields: Any) -> transformers.BigBirdPegasusConfig:
    return transformers.BigBirdPegasusConfig(
        **THEIRS,
        max_position_embeddings=96,
        block_size=4,
        num_random_blocks=1,
        dropout=0.0,
        **fields,
    )


def bigbird_ours(model_class: Any, **fields: Any) -> Any:
    positions = {"max_position_embeddings": 96, "max_target_position_embeddings": 96}
    preset = {"block_tokens": 4, "num_random_blocks": 1, "plan": "transformers", "full_attention_up_to": 28}
    config = hea.SparseSeq2SeqConfig.bigbird_pegasus(
        **{**preset, **positions, **OURS, "hidden_dropout": 0.0, "embedding_dropout": 0.0, **fields}
    )
    return model_class(config).eval()


@pytest.mark.parametrize("source_tokens", [20, 28, 29, 60, 63])
def test_bigbird_pegasus_in_eval_mode(source_tokens: int) -> None:
    """Up to 28 = (5 + 2·1)·4 tokens transformers reads fully, and in eval mode it has no random blocks.

    Longer sources are unpadded here: in transformers, padding moves the last global block away from the text.
    """
    theirs = randomize_all(transformers.BigBirdPegasusForConditionalGeneration(sparse_config())).eval()
    model = bigbird_ours(hea.SparseSeq2SeqForConditionalGeneration, random_blocks_in_eval="transformers")
    copy_in_tree(theirs, model, BIGBIRD_PEGASUS)
    inputs = batch(source_tokens, source_padding=5 if source_tokens <= 28 else 0)
    with torch.no_grad():
        expected, actual = theirs(**inputs), model(**inputs)
    assert_same(actual.encoder_last_hidden_state, expected.encoder_last_hidden_state, inputs["attention_mask"], 1e-5)
    assert_same(actual.logits, expected.logits, inputs["decoder_attention_mask"], 1e-5)


def test_bigbird_pegasus_in_training_reads_the_same_random_blocks() -> None:
    theirs = randomize_all(transformers.BigBirdPegasusForConditionalGeneration(sparse_config())).train()
    model = bigbird_ours(hea.SparseSeq2SeqForConditionalGeneration).train()
    copy_in_tree(theirs, model, BIGBIRD_PEGASUS)
    inputs = batch(60, source_padding=0)
    with torch.no_grad():
        expected, actual = theirs(**inputs).logits, model(**inputs).logits
    assert_same(actual, expected, inputs["decoder_attention_mask"], 1e-5)


def longformer_weights(
    weights: torch.Tensor, window: int, is_global: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dense weights [B, H, T, T] in the shapes of LongformerBaseModelOutput's attentions, global_attentions."""
    index = torch.argsort(~is_global, dim=1, stable=True)[:, : int(is_global.sum(1).max())]
    is_there = is_global.gather(1, index)[:, None, None]

    def of_globals(scores: torch.Tensor) -> torch.Tensor:
        return scores.gather(3, index[:, None, None].expand(*scores.shape[:3], -1)) * is_there

    side, tokens = window // 2, weights.shape[2]
    keys = torch.arange(tokens)[:, None] + torch.arange(-side, side + 1)
    inside, keys = (keys >= 0) & (keys < tokens), keys.clamp(0, tokens - 1)
    near = weights.gather(3, keys.expand(*weights.shape[:3], -1)) * (inside & ~is_global[:, keys])[:, None]
    local = torch.cat((of_globals(weights), near), -1)
    return local.masked_fill(is_global[:, None, :, None], 0), of_globals(weights.transpose(2, 3))


@pytest.mark.filterwarnings("ignore:output_attentions=True")
def test_attentions_of_led() -> None:
    theirs = randomize_all(transformers.LEDForConditionalGeneration(led_config(attn_implementation="eager"))).eval()
    model = led_ours(hea.SparseSeq2SeqForConditionalGeneration)
    copy_in_tree(theirs, model, LED)
    inputs = batch(21)
    chosen = global_masks(inputs)[0]
    with torch.no_grad():
        options = {"global_attention_mask": chosen, "output_attentions": True}
        actual, expected = (each(**inputs, **options) for each in (model, theirs))
    for name in ("decoder_attentions", "cross_attentions"):
        for ours, other in zip(actual[name], expected[name], strict=True):
            assert_same(ours.transpose(1, 2), other.transpose(1, 2), inputs["decoder_attention_mask"], 1e-6)
    for layer, window in enumerate((4, 8)):
        local, of_globals = longformer_weights(actual.encoder_attentions[layer], window, chosen.bool())
        other = expected.encoder_attentions[layer]
        assert_same(local.transpose(1, 2), other.transpose(1, 2), inputs["attention_mask"], 1e-6)
        other = expected.encoder_global_attentions[layer][:, :, :21]
        torch.testing.assert_close(of_globals, other, atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:output_attentions=True")
def test_every_documented_output_has_the_shape_of_led() -> None:
    """But for encoder attentions, which are one matrix over all pairs here, and windows plus globals there."""
    theirs = transformers.LEDForConditionalGeneration(led_config(attn_implementation="eager")).eval()
    model = led_ours(hea.SparseSeq2SeqForConditionalGeneration)
    inputs = {**batch(21), "output_attentions": True, "output_hidden_states": True, "use_cache": True}
    with torch.no_grad():
        actual, expected = model(**inputs), theirs(**inputs)
    for name in ("decoder_hidden_states", "decoder_attentions", "cross_attentions", "encoder_hidden_states"):
        assert [each.shape for each in actual[name]] == [each.shape for each in expected[name]], name
    assert [each.shape for each in actual.encoder_attentions] == [(3, 4, 21, 21)] * 2
    real = inputs["decoder_attention_mask"][:, None].expand(-1, 4, -1).bool()
    for weights in (*actual.cross_attentions, *actual.decoder_attentions):
        torch.testing.assert_close(weights.sum(-1)[real], torch.ones(int(real.sum())))
    assert len(actual.past_key_values.cross_attention_cache) == 3
