"""Translation is that of the specification, node by node, gradients included; prompts with padding, refused fields."""

from typing import Any

import pytest
import torch
from families import BY_NAME
from models.bp_transformer.tree_by_nodes import tree_by_nodes
from seq2seq_cases import TINY, random_ids
from torch import Tensor

import hf_efficient_attn as hea

START = TINY["decoder_start_token_id"]
TARGET = [False, True, True, True, True, True, True, False, False]
SOURCE = [False, False, True, True, True, False, True, True, True, True, True]


def embedded(stack: dict[str, Tensor], table: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """Return the embeddings of a row with their positions, which count real tokens."""
    positions = stack.get("embeddings.positions.table.weight")
    added = 0 if positions is None else positions[(real.cumsum(0) - 1).clamp(min=0)]
    return table[ids[0]] + added


def translated(model: Any, source: Tensor, target: Tensor, masks: tuple[list[bool], list[bool]]) -> Tensor:
    """Return the states of the real target tokens, node by node, [T, hidden_size]."""
    weights, found = dict(model.named_parameters()), None
    for side, ids, mask in zip(("encoder", "decoder"), (source, target), masks, strict=True):
        stack = {name.removeprefix(f"{side}."): each for name, each in weights.items() if name.startswith(side)}
        first, last = mask.index(True), len(mask) - mask[::-1].index(True)
        real = torch.tensor(mask)
        rows = embedded(stack, weights["embed_tokens.weight"], ids, real)[first:last]
        states, _ = tree_by_nodes(model.config, stack, rows, mask[first:last], side == "decoder", found)
        found = states[real[first:last]]
    return found


@pytest.mark.parametrize("masks", [([True] * 11, [True] * 9), (SOURCE, TARGET)], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["bp-seq2seq", "bp-seq2seq-positions"])
def test_states_and_gradients_are_those_of_the_specification(name: str, masks: tuple[list[bool], list[bool]]) -> None:
    model = BY_NAME[name].model("AutoModel").double()
    source, target = random_ids(1, 11), random_ids(1, 9, seed=4)
    read, written = (torch.tensor(mask)[None] for mask in masks)
    states = model(source, read.long(), target, written.long(), use_cache=False).last_hidden_state[written]
    expected = translated(model, source, target, masks)
    torch.testing.assert_close(states, expected, atol=1e-12, rtol=1e-9)
    named = {name: each for name, each in model.named_parameters() if "embed" not in name}
    signs = torch.arange(states.numel()).view_as(states).sin()
    wanted = torch.autograd.grad((expected * signs).sum(), list(named.values()), allow_unused=True)
    found = torch.autograd.grad((states * signs).sum(), list(named.values()))
    for key, one, other in zip(named, found, wanted, strict=True):
        other = torch.zeros_like(one) if other is None else other
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8, msg=key)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_prompts_padded_on_either_side_generate_the_same(num_beams: int) -> None:
    """Their padding comes first; behind it stand the start token and the prompt."""
    model, ids = BY_NAME["bp-seq2seq"].model(), random_ids(2, 9)
    prompts = torch.tensor([[START, 0, 0, 5, 6], [START, 7, 8, 0, 0]])
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": num_beams}
    found = model.generate(ids, decoder_input_ids=prompts, decoder_attention_mask=(prompts > 0).long(), **options)
    assert found[:, :5].tolist() == [[0, 0, START, 5, 6], [0, 0, START, 7, 8]]
    for row, prompt in enumerate(([START, 5, 6], [START, 7, 8])):
        alone = model.generate(ids[row : row + 1], decoder_input_ids=torch.tensor([prompt]), **options)
        assert torch.equal(found[row, 2:], alone[0])


def test_spans_of_the_target_pass_on_what_tokens_have_read_of_the_source() -> None:
    """So far tokens know of the source by two ways, and a single layer has one."""
    model, target = BY_NAME["bp-seq2seq"].model("AutoModel"), random_ids(1, 9)
    seen: list[Tensor] = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda layer, args, out: seen.append(out[1]))
    with torch.no_grad():
        for seed in (1, 2):
            model(random_ids(1, 7, seed), decoder_input_ids=target)
    first, second, first_of_other, second_of_other = seen
    torch.testing.assert_close(first, first_of_other)
    # the span behind the first token exists, and has two tokens
    assert not torch.allclose(second[:, 0], second_of_other[:, 0], atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_nodes": 0}, "num_nodes=0: a token reads at least 1 node"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0 must be at least 0"),
        ({"norm_position": "pre"}, "must be one of: post"),
    ],
)
def test_fields_that_exclude_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=message):
        hea.BPSeq2SeqConfig(**fields)
    with pytest.raises(hea.ConfigurationError, match="does not say which stack"):
        hea.BPSeq2SeqConfig.wmt14(num_hidden_layers=3)


def test_presets_have_the_parameters_of_their_shapes() -> None:
    config = hea.BPSeq2SeqConfig.wmt14(vocab_size=37_000)
    with torch.device("meta"):
        model = hea.BPSeq2SeqForConditionalGeneration(config)
    hidden, inner = config.hidden_size, config.intermediate_size
    # 2k + 1 of a level, of tokens, pairs and all larger spans
    relations = 9 * 3 * config.head_dim
    layer = 4 * hidden**2 + 2 * hidden * inner + inner + hidden + 4 * hidden
    both = 12 * (layer + relations) + 6 * (4 * hidden**2 + 2 * hidden) + 4 * hidden
    assert model.num_parameters() == both + 37_000 * hidden
