"""Losses of earlier layers under `Trainer`: fewer and fewer layers predict as training advances."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.modeling_utils import unwrap_model

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.training.auxiliary_loss_callback import refuse_label_smoothing


class LayerLossCallback(TrainerCallback):
    """Tell a model with `layer_losses` how much of the training is over, before every step.

    After a share a of the training, layer i of n, counted from 1, predicts if i > n · a, and the last one always does.
    Training that resumes goes on where it was.

    >>> import hf_efficient_attn as hea
    >>> callbacks = [hea.LayerLossCallback()]  # Trainer(model, args, train_dataset=data, callbacks=callbacks)

    Raises:
        InputError: at the start of training, a model without `layer_losses`, or label smoothing, with which Trainer
            computes a loss of its own, without those of earlier layers.

    Source: the authors' code of BP-Transformer (Ye et al., arXiv:1911.04070), which counts by epochs.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = kwargs["model"]
        if not getattr(unwrap_model(model).config, "layer_losses", False):
            raise InputError(
                f"{type(unwrap_model(model)).__name__} has no losses of layers. Build it with layer_losses=True, or "
                "leave LayerLossCallback out."
            )
        refuse_label_smoothing(args, "the losses of earlier layers (layer_losses)")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for module in unwrap_model(kwargs["model"]).modules():
            if hasattr(module, "progress"):
                module.progress = state.global_step / max(1, state.max_steps)
