"""Translation is that of the specification, node by node, gradients included; prompts with padding, refused fields."""

from typing import Any

import pytest
import torch
from families import BY_NAME
from models.bp_seq2seq.translation_by_nodes import MASKS, Masks, check_translation
from seq2seq_cases import TINY, random_ids
from torch import Tensor

import hf_efficient_attn as hea

START = TINY["decoder_start_token_id"]


@pytest.mark.parametrize("masks", MASKS, ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["bp-seq2seq", "bp-seq2seq-positions"])
def test_states_and_gradients_are_those_of_the_specification(name: str, masks: Masks) -> None:
    check_translation(BY_NAME[name].model("AutoModel").double(), masks)


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
