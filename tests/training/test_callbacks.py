"""Callbacks: the loss that layers add is logged and not dropped silently; last steps that read everything."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers as tr
from attention_models import DECODER, build, token_ids
from datasets import Dataset
from models.bp_transformer.tiny_models import build as tree
from models.routing_transformer.tiny_models import build as routing
from models_cases import trainer_arguments
from torch import nn
from torch.nn.functional import cross_entropy
from training.span_runs import build_model as with_spans
from trl.trainer import utils as trl_utils

import hf_efficient_attn as hea
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.hub.card import model_card
from hf_efficient_attn.integration.layer_patterns import module_pattern
from hf_efficient_attn.messages import warn_once
from hf_efficient_attn.patterns import BlockTopK, Causal

VOCAB = 32
MODELS = {
    "indexers": lambda: hea.index_stage(hea.index(build("llama"), top_k=4, num_heads=2), "sparse"),
    "centroids": lambda: routing("AutoModelForCausalLM"),
    "spans": lambda: with_spans(span_init=0.5, span_penalty=0.1),
}


def trainer(folder: Path, model: Any, loss: Any = None, **changes: Any) -> transformers.Trainer:
    options = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
    ids = torch.randint(3, VOCAB, (8, 12), generator=torch.Generator().manual_seed(0)).tolist()
    return transformers.Trainer(
        model,
        trainer_arguments(folder, **{**options, "bf16": True, **changes}),
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        callbacks=[hea.AuxiliaryLossCallback()],
        compute_loss_func=loss,
    )


@pytest.mark.parametrize("name", MODELS)
def test_trainer_logs_it(tmp_path: Path, name: str) -> None:
    """Also under autocast, where accelerate makes outputs anew."""
    model, seen = MODELS[name](), []
    model.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.auxiliary_loss.item()))
    running = trainer(tmp_path, model)
    running.train()
    logged = [entry["auxiliary_loss"] for entry in running.state.log_history[:2]]
    assert logged == pytest.approx([sum(seen[:2]) / 2, sum(seen[2:]) / 2], rel=1e-4)
    assert min(logged) > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("adds", [True, False])
def test_a_loss_of_the_users_has_to_add_it(tmp_path: Path, name: str, adds: bool) -> None:
    warn_once.cache_clear()

    def own(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = cross_entropy(outputs.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return loss + outputs.auxiliary_loss if adds else loss

    running = trainer(tmp_path, MODELS[name](), own, bf16=False)
    if adds:
        running.train()
    else:
        with pytest.warns(UserWarning, match=r"does not include auxiliary_loss.*Add outputs\.auxiliary_loss"):
            running.train()


@pytest.mark.parametrize("name", [*MODELS, "layers"])
@pytest.mark.parametrize("computes", ["TRL", "Trainer"])
def test_what_computes_the_loss_itself_leaves_it_out_with_a_warning(tmp_path: Path, name: str, computes: str) -> None:
    """TRL from the backbone's states; Trainer from the logits, where it smooths labels."""
    warn_once.cache_clear()
    layers = {"is_causal": True, "layer_losses": True}
    model = tree("AutoModelForCausalLM", **layers) if name == "layers" else MODELS[name]()
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    if computes == "TRL":
        trl_utils.add_fused_lm_head(model)
        loss = model.train()(input_ids=ids, labels=ids, fused_lm_head=True).loss
        learn = loss.backward
    else:
        running = trainer(tmp_path, model, label_smoothing_factor=0.1, bf16=False)
        running.callback_handler.remove_callback(hea.AuxiliaryLossCallback)
        learn = running.train
    with pytest.warns(UserWarning, match=r"does not include auxiliary_loss.*TRL"):
        learn()


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(hea.InputError, match="label_smoothing_factor=0"):
        trainer(tmp_path, MODELS["indexers"](), label_smoothing_factor=0.1).train()
    with pytest.raises(hea.InputError, match="LlamaForCausalLM"):
        trainer(tmp_path, build("llama")).train()


def test_explain_and_the_card_say_what_an_indexer_chooses() -> None:
    model = MODELS["indexers"]()
    explanation = hea.explain(model, 64)
    assert explanation.allowed_pairs == 4 * (1 + 2 + 3 + 61 * 4)
    card = model_card(model).text
    assert "whose queries attend to keys that indexers select" in card
    assert "| 0–1 | `causal()`, keys selected by content (gathered) | 4.0 |" in card
    assert "2 heads of 8 dimensions" in card
    assert "learns which 4 keys to select" in model_card(hea.index_stage(model, "warmup")).text


PATTERN = BlockTopK(4, 2)


def trained(model: Any, folder: Path, *callbacks: Any, **options: Any) -> tr.Trainer:
    rows = [{"input_ids": row, "labels": row} for row in token_ids(8, 24)]
    args = trainer_arguments(folder, per_device_train_batch_size=2, max_steps=4, **options)
    return tr.Trainer(model, args, train_dataset=rows, eval_dataset=rows[:2], callbacks=[*callbacks])  # type: ignore[arg-type]


class Watch(tr.TrainerCallback):
    """Notes what the first layer reads in every forward pass, and whether it is training."""

    def __init__(self, layer: nn.Module) -> None:
        self.read: list[tuple[bool, Any]] = []
        layer.register_forward_hook(lambda layer, *_: self.read.append((layer.training, module_pattern(layer, True))))


def test_last_steps_read_everything(tmp_path: Path) -> None:
    model = hea.sparsify(tr.LlamaForCausalLM(tr.LlamaConfig(**DECODER)), [PATTERN, None])
    watch = Watch(model.model.layers[0].self_attn)
    trainer = trained(
        model,
        tmp_path,
        hea.FullAttentionPhase(0.5),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=3,
    )
    trainer.train()
    assert [pattern for training, pattern in watch.read if training] == [PATTERN, PATTERN, Causal(), Causal()]
    assert {pattern for training, pattern in watch.read if not training} == {PATTERN}
    saved = tr.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-3", attn_implementation="efficient")
    assert saved.config.attention_pattern == model.config.attention_pattern == [PATTERN.to_dict(), None]
    watch.read.clear()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [pattern for training, pattern in watch.read if training] == [Causal()]


def test_refusals_of_the_phase(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be a fraction"):
        hea.FullAttentionPhase(10)
    model = tr.LlamaForCausalLM(tr.LlamaConfig(**DECODER))
    with pytest.raises(InputError, match="has no attention_pattern"):
        trained(model, tmp_path, hea.FullAttentionPhase()).train()
