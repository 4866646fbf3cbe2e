"""optimizer_groups decays matrices and nothing else, for every block and every kind of norm and bias."""

import pytest
import torch
from torch import nn
from training.tiny_models import two_blocks

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.module import span_modules

BLOCKS = ("pre_ln", "parallel", "v_skipinit", "sas", "sas_p", "sas_p_no_norm")
WEIGHT_DECAY, LR = 0.1, 0.01


def build_model(block: str = "sas") -> hea.SimplifiedTransformerForCausalLM:
    """Return a model with every kind of parameter there is, none of them 0."""
    torch.manual_seed(0)
    model = two_blocks(
        block,
        attention_bias="all",
        mlp_bias=True,
        gated_mlp=True,
        final_norm_type="layernorm",
        position_embedding_type="scaled_sinusoidal",
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def names_by_group(model: nn.Module) -> tuple[set[str], set[str]]:
    """Return the names of the decayed and of the other parameters, after checking that no tensor is listed twice."""
    decayed, others = hea.optimizer_groups(model, WEIGHT_DECAY)
    assert (decayed["weight_decay"], others["weight_decay"]) == (WEIGHT_DECAY, 0.0)
    listed = [id(parameter) for parameter in [*decayed["params"], *others["params"]]]
    assert len(listed) == len(set(listed))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(each)] for each in decayed["params"]}, {names[id(each)] for each in others["params"]}


@pytest.mark.parametrize("block", BLOCKS)
def test_matrices_are_decayed_and_the_rest_is_not(block: str) -> None:
    """Weights of linear maps, embeddings and ΔW are decayed; gains, norms, biases, position scale are not."""
    model = build_model(block)
    decayed, others = names_by_group(model)
    assert decayed | others == {name for name, _ in model.named_parameters()}, "each exactly once"

    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(path, recurse=False):
            if parameter is model.lm_head.weight and path == "lm_head":
                continue  # tied: listed as the embedding
            is_matrix = isinstance(module, (nn.Linear, nn.Embedding)) or "Reparameterized" in type(module).__name__
            expected = decayed if is_matrix and not kind.endswith("bias") else others
            assert kind in expected
    assert any("gain" in name for name in others) is (block not in ("pre_ln", "parallel"))
    assert any("norm" in name for name in others)
    assert any("bias" in name for name in others)


def test_frozen_parameters_are_left_out() -> None:
    """A frozen parameter is in no group."""
    model = build_model()
    model.model.embed_tokens.requires_grad_(False)
    decayed, others = names_by_group(model)
    assert decayed | others == {name for name, each in model.named_parameters() if each.requires_grad}


def test_nothing_trainable_is_an_error() -> None:
    """A wholly frozen model gets a sentence, not an optimizer without parameters."""
    with pytest.raises(ValueError, match="SimplifiedTransformerForCausalLM has no trainable parameter"):
        hea.optimizer_groups(build_model().requires_grad_(False), WEIGHT_DECAY)


def span_model(**fields: object) -> hea.AdaptiveSpanForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = hea.AdaptiveSpanConfig(**sizes, num_attention_heads=2, span_limit=64, span_ramp=4, **fields)
    return hea.AdaptiveSpanForCausalLM(config)


@pytest.mark.parametrize(("span", "names"), [("adaptive", {"ratio"}), ("dynamic", {"weight", "bias"})])
def test_spans_are_a_group_of_their_own(span: str, names: set[str]) -> None:
    """Spans, dynamic ones' matrix included, are not decayed; every parameter is in exactly one group."""
    model = span_model(span=span)
    *rest, spans = hea.optimizer_groups(model, WEIGHT_DECAY, span_lr=0.5)
    assert [group["weight_decay"] for group in (*rest, spans)] == [WEIGHT_DECAY, 0.0, 0.0]
    assert spans["lr"] == 0.5
    assert not any("lr" in group for group in rest)
    expected = {f"model.layers.{layer}.self_attn.spans.{name}" for layer in range(2) for name in names}
    listed = {id(parameter) for parameter in spans["params"]}
    assert {name for name, parameter in model.named_parameters() if id(parameter) in listed} == expected
    everywhere = [id(parameter) for group in (*rest, spans) for parameter in group["params"]]
    assert sorted(everywhere) == sorted(id(parameter) for parameter in model.parameters())


@pytest.mark.parametrize("options", [{"weight_decay": -1}, {"weight_decay": 0.1, "span_lr": float("nan")}])
def test_numbers_that_no_optimizer_takes_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(hea.InputError, match="must be a finite number of at least 0"):
        hea.optimizer_groups(span_model(), **options)


def test_spans_that_are_not_trained_have_no_group() -> None:
    """Fixed and frozen spans leave the two groups of any other model, and take no rate."""
    frozen = {"frozen_spans": [[3.0, 5.0], [0.0, 64.0]], "span_penalty": 0.0}
    for model in (span_model(span="fixed"), span_model(**frozen), build_model()):
        assert len(hea.optimizer_groups(model, WEIGHT_DECAY)) == 2
        with pytest.raises(hea.InputError, match=r"span_lr=0\.1: .* has no trainable span"):
            hea.optimizer_groups(model, WEIGHT_DECAY, span_lr=0.1)
    model = span_model()
    for module in span_modules(model):
        module.requires_grad_(False)
    assert len(hea.optimizer_groups(model, WEIGHT_DECAY)) == 2
