"""With `layer_losses` earlier layers predict, too, fewer and fewer as training advances, and the loss is their mean."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from models.bp_transformer.tiny_models import build
from models_cases import random_ids
from transformers import Trainer, TrainingArguments

import hf_efficient_attn as hea

FIELDS: dict[str, Any] = {"is_causal": True, "layer_losses": True, "num_hidden_layers": 4}


@pytest.mark.filterwarnings("ignore:The loss that is trained does not contain auxiliary_loss:UserWarning")
@pytest.mark.parametrize(("progress", "predicting"), [(0.0, 4), (0.25, 3), (0.6, 2), (1.0, 1)])
def test_the_loss_is_the_mean_of_the_layers_that_predict(progress: float, predicting: int) -> None:
    model, ids = build("AutoModelForCausalLM", **FIELDS).train(), random_ids(2, 9)
    labels = ids.clone()
    labels[0, 6:] = -100
    model.model.progress = progress
    states = model(ids, output_hidden_states=True).hidden_states[1:]
    losses = [model.loss_function(model.lm_head(each), labels, model.config.vocab_size) for each in states]
    expected = torch.stack(losses[-predicting:]).mean()
    found = model(ids, labels=labels)
    torch.testing.assert_close(found.loss, expected)
    # Trainer divides by the tokens of all batches of a step
    shared = model(ids, labels=labels, num_items_in_batch=2 * (labels[:, 1:] != -100).sum())
    torch.testing.assert_close(shared.loss, expected / 2)
    gradients = [torch.autograd.grad(each, list(model.parameters())) for each in (found.loss, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    evaluated = model.eval()(ids, labels=labels)
    assert evaluated.auxiliary_loss is None
    torch.testing.assert_close(evaluated.loss, losses[-1])


def test_a_micro_batch_without_labels_has_no_loss() -> None:
    """As of every model: one of several that make a step may have none that count."""
    model, ids = build("AutoModelForCausalLM", **FIELDS).train(), random_ids(2, 9)
    loss = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=torch.tensor(5)).loss
    assert loss == 0
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_callback_says_how_much_of_the_training_is_over(tmp_path: Path) -> None:
    model, seen = build("AutoModelForCausalLM", **FIELDS), []
    model.model.register_forward_pre_hook(lambda module, _: seen.append(module.progress))
    rows = Dataset.from_dict({"input_ids": random_ids(4, 6).tolist(), "labels": random_ids(4, 6).tolist()})
    options: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True}
    options |= {"disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False}
    args = TrainingArguments(str(tmp_path), **options)
    callbacks = [hea.LayerLossCallback(), hea.AuxiliaryLossCallback()]
    Trainer(model, args, train_dataset=rows, callbacks=callbacks).train()
    assert seen == [0.0, 0.25, 0.5, 0.75]
    other = build("AutoModelForCausalLM", is_causal=True)
    with pytest.raises(hea.InputError, match="has no losses of layers"):
        Trainer(other, args, train_dataset=rows, callbacks=[hea.LayerLossCallback()]).train()
