"""What the heads share: pooling that fits the direction, and where padding is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models_cases import TINY, head_inputs, trainer_arguments
from safetensors.torch import load_file

import hf_efficient_attn as hea
from hf_efficient_attn.models.heads.task_heads import pool, real_tokens
from hf_efficient_attn.models.register import HEADS

HIDDEN = torch.arange(10.0).view(1, 5, 2)


@pytest.mark.parametrize(
    ("how", "is_causal", "mask", "expected"),
    [
        (None, True, [0, 1, 1, 1, 0], [6, 7]),
        (None, False, [0, 1, 1, 1, 0], [4, 5]),
        ("first", False, [0, 1, 1, 1, 0], [2, 3]),
        ("first", True, [1, 1, 1, 1, 1], [0, 1]),
        ("last", False, [1, 1, 0, 0, 0], [2, 3]),
        ("mean", True, [1, 1, 0, 0, 0], [1, 2]),
    ],
)
def test_pool(how: str | None, is_causal: bool, mask: list[int], expected: list[int]) -> None:
    real = torch.tensor([mask]).bool()
    assert pool(HIDDEN, real, how, is_causal).tolist() == [expected]


def test_mean_of_long_sequences_does_not_overflow_in_fp16() -> None:
    hidden = torch.full((1, 4100, 1), 20.0, dtype=torch.float16)
    assert pool(hidden, torch.ones(1, 4100, dtype=torch.bool), "mean", False).tolist() == [[20.0]]


def test_means_of_float64_are_computed_in_float64() -> None:
    hidden = torch.tensor([[[1.0], [1.0 + 1e-12]]], dtype=torch.float64)
    assert float(pool(hidden, torch.ones(1, 2, dtype=torch.bool), "mean", False)) == 1.0 + 5e-13


def test_padding_is_found_without_a_mask() -> None:
    ids = torch.tensor([[5, 6, 0, 0]])
    assert real_tokens(torch.zeros(1, 4, 2), ids, None, 0).tolist() == [[True, True, False, False]]
    assert real_tokens(torch.zeros(1, 4, 2), ids, None, None).all()
    assert real_tokens(torch.zeros(1, 4, 2), None, None, 0).all()


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        ({"num_labels": 1}, torch.tensor([0.5, 1.5])),
        ({"num_labels": 3}, torch.tensor([0, 2])),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.tensor([[0.0, 1, 1], [1, 0, 0]])),
    ],
    ids=["regression", "single-label", "multi-label"],
)
def test_problem_types(fields: dict, labels: torch.Tensor) -> None:
    model = hea.SimplifiedTransformerForSequenceClassification(hea.SimplifiedTransformerConfig(**TINY, **fields))
    loss = model(torch.tensor([[5, 6, 7], [8, 9, 10]]), labels=labels).loss
    loss.backward()
    assert torch.isfinite(loss)


def test_logits_to_keep() -> None:
    model = hea.SimplifiedTransformerForCausalLM(hea.SimplifiedTransformerConfig(**TINY)).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    full = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=1).logits, full[:, -1:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([0, 2])).logits, full[:, [0, 2]])


def test_accumulated_gradients_are_those_of_the_batch(tmp_path: Path) -> None:
    """Trainer asks a head whether its loss counts the items of all accumulated batches; those of labels do not."""
    seen = []
    for size, steps in ((4, 1), (1, 4)):
        torch.manual_seed(0)
        config = hea.SparseTransformerConfig.sliding(
            **{**TINY, "left": 2, "num_hidden_layers": 1, "hidden_dropout": 0.0}
        )
        config.attention_dropout = config.embedding_dropout = config.classifier_dropout = 0.0
        rows = [{"input_ids": torch.arange(3 + row, 9 + row), "labels": row % 2} for row in range(4)]
        trainer = transformers.Trainer(
            hea.SparseTransformerForSequenceClassification(config),
            trainer_arguments(
                tmp_path,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=steps,
                max_steps=1,
                logging_steps=1,
                max_grad_norm=1e9,
            ),
            train_dataset=rows,
        )
        trainer.train()
        seen.append(trainer.state.log_history[0])
    assert seen[0]["loss"] == pytest.approx(seen[1]["loss"], abs=1e-3)
    assert seen[0]["grad_norm"] == pytest.approx(seen[1]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("head", HEADS)
def test_what_layers_ask_for_is_added_and_reported(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = hea.SparseTransformerConfig(**TINY, is_causal=head == "CausalLM")
    model = getattr(hea, f"SparseTransformerFor{head}")(config)
    inputs, forward = head_inputs(f"AutoModelFor{head}"), model.model.forward
    plain = model(**inputs)

    def asking(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        outputs.auxiliary_loss = torch.tensor(7.0)
        return outputs

    monkeypatch.setattr(model.model, "forward", asking)
    outputs = model(**inputs)
    assert plain.auxiliary_loss is None
    assert outputs.auxiliary_loss.item() == 7
    torch.testing.assert_close(outputs.loss, plain.loss + 7)


@pytest.mark.parametrize("family", ["SparseTransformer", "CompressedTransformer"])
def test_files_have_the_transform_of_decoders_under_its_name_in_a_head(family: str, tmp_path: Path) -> None:
    """In the model it belongs to the backbone. Trainer loads its checkpoints by `load_state_dict`."""
    model_class = getattr(hea, f"{family}ForCausalLM")
    mechanism = {"mechanism": "linear"} if family.startswith("Compressed") else {}
    config = getattr(hea, f"{family}Config")(**TINY, is_causal=True, lm_head_transform=True, **mechanism)
    model = model_class(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    names = {f"transform.{name}.{kind}" for name in ("dense", "norm") for kind in ("weight", "bias")}
    assert {name for name in index if "transform" in name} == names
    loaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    saved: dict[str, torch.Tensor] = {}
    for file in set(index.values()):
        saved |= load_file(tmp_path / file)
    resumed = model_class(config)
    resumed.load_state_dict(saved, strict=False)
    for other in (loaded, resumed):
        torch.testing.assert_close(dict(other.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)
    model.load_state_dict(model.state_dict())
