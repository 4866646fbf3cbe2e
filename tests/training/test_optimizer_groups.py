"""optimizer_groups decays matrices and nothing else, for every block and every kind of norm and bias."""

from pathlib import Path

import pytest
import torch
import transformers
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


def test_update_of_the_kept_value_matrix_is_decayed() -> None:
    """ΔW of the first layer's W^V, which SAS keeps, is decayed (so W^V is pulled to W_init); its gains are not."""
    decayed, others = names_by_group(build_model("sas"))
    assert "model.layers.0.self_attn.v_proj.weight" in decayed
    assert "model.layers.0.self_attn.v_proj.update_gain.gain" in others
    assert "model.layers.0.self_attn.v_proj.skip_gain.gain" in others


def test_trainer_takes_the_groups(tmp_path: Path) -> None:
    """One step of Trainer(optimizers=(AdamW, None)): decay moves each matrix by lr·decay·weight and nothing else."""
    start = build_model().state_dict()
    plain, decayed = (train_one_step(tmp_path, weight_decay) for weight_decay in (0.0, WEIGHT_DECAY))
    names, _ = names_by_group(build_model())
    for name, before in start.items():
        pull = LR * WEIGHT_DECAY * before if name in {*names, "lm_head.weight"} else torch.zeros_like(before)
        torch.testing.assert_close(plain[name] - decayed[name], pull, atol=1e-7, rtol=0)


def train_one_step(folder: Path, weight_decay: float) -> dict[str, torch.Tensor]:
    model = build_model()
    optimizer = torch.optim.AdamW(hea.optimizer_groups(model, weight_decay), lr=LR)
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=1,
        save_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
    )
    rows = torch.randint(0, 64, (8, 8), generator=torch.Generator().manual_seed(1)).tolist()
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=transformers.default_data_collator,
        optimizers=(optimizer, None),
    )
    trainer.train()
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [weight_decay, 0.0]
    return model.state_dict()


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


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adagrad])
def test_rate_of_the_spans_alone(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """A first step moves each share by its own rate, else by the common one, whatever the size of the gradient."""
    for span_lr, rate in ((0.25, 0.25), (None, 0.01)):
        model = span_model(span="adaptive", span_init=0.5)
        optimizer = optimizer_class(hea.optimizer_groups(model, WEIGHT_DECAY, span_lr), lr=0.01)
        for module in span_modules(model):
            module.ratio.grad = torch.full_like(module.ratio, 0.01)
        optimizer.step()
        for module in span_modules(model):
            torch.testing.assert_close(module.ratio, torch.full_like(module.ratio, 0.5 - rate), rtol=1e-4, atol=0)


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
