"""Compiled models on a GPU: one program without breaks, which holds flex, right to the last digits of its dtype.

Collected only where a GPU is: `pytest -m gpu`.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_efficient_attn as hea

pytestmark = pytest.mark.gpu
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 60,
}
# the first is compiled for itself, the others share a program
LENGTHS = (300, 700, 1000)


def llama() -> PreTrainedModel:
    config = LlamaConfig(num_key_value_heads=2, max_position_embeddings=1024, **SIZES)
    return hea.sparsify(LlamaForCausalLM(config), hea.patterns.Band(64, 0))


def longformer() -> PreTrainedModel:
    no_dropout = dict.fromkeys(("embedding_dropout", "hidden_dropout", "attention_dropout"), 0.0)
    config = hea.SparseTransformerConfig.longformer(
        attention_window=64, is_causal=True, global_tokens="first", max_position_embeddings=1024, **SIZES, **no_dropout
    )
    return hea.SparseTransformerForCausalLM(config)


def inputs_of(num_tokens: int, device: str) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (2, num_tokens), generator=torch.Generator().manual_seed(num_tokens))
    mask = torch.arange(num_tokens).expand(2, -1) < torch.tensor([[num_tokens], [num_tokens - 70]])
    labels = ids.masked_fill(~mask, -100)
    return {name: x.to(device) for name, x in (("input_ids", ids), ("attention_mask", mask.long()), ("labels", labels))}


def step(model: PreTrainedModel, forward: Callable, num_tokens: int, device: str = "cuda") -> list[Tensor]:
    """Return the loss and the gradients, in float64 on the CPU."""
    loss = forward(**inputs_of(num_tokens, device), use_cache=False).loss
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters)
    return [each.detach().cpu().double() for each in (loss, *gradients)]


@pytest.mark.parametrize("build", [llama, longformer])
def test_a_compiled_model_computes_with_flex(build: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(0)
    exact = build().double()
    model = copy.deepcopy(exact).float().cuda()
    compiled = torch.compile(model, fullgraph=True)
    for num_tokens in LENGTHS:
        with hea.use_backend("reference"):
            expected = step(exact, exact, num_tokens, "cpu")
            rounded = step(model, model, num_tokens)
        found = step(model, compiled, num_tokens)
        for correct, typical, own in zip(expected, rounded, found, strict=True):
            last_digit = torch.finfo(torch.float32).eps * correct.abs().max()
            assert (own - correct).abs().max() <= 8 * ((typical - correct).abs().max() + last_digit)


@pytest.mark.parametrize("build", [llama, longformer])
def test_the_program_has_no_breaks_and_holds_flex(build: Callable[[], PreTrainedModel]) -> None:
    model = build().cuda()
    explanation = torch._dynamo.explain(model)(**inputs_of(300, "cuda"), use_cache=False)
    code = "".join(program.code for program in explanation.graphs)
    assert explanation.graph_break_count == 0
    assert "flex_attention" in code
    assert "blocked_attention" not in code
    assert "allowed_pairs" not in code


def test_auto_is_flex() -> None:
    assert hea.explain(hea.patterns.Band(64, 0), 4096, device="cuda", training=True).backend == "flex"
