"""Draw the random features of linear attention anew every so many steps of a training."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.modeling_utils import unwrap_model

from hf_efficient_attn.errors import InputError


class RedrawFeaturesCallback(TrainerCallback):
    """Replace the features of Performers every `feature_redraw_steps` steps of `Trainer`, as their config says.

    So that a model does not adapt to one draw, whose errors then are no longer 0 in the mean. What is drawn depends on
    the config's `feature_seed` and on the step alone: all processes, and a training that resumes, have the same. The
    last draw is saved with the model.

    Raises:
        InputError: at the start of training, a model whose config has no `feature_redraw_steps`, or an adapter of PEFT,
            which is saved without the features of the model below it.

    Source: Choromanski et al., "Rethinking Attention with Performers" (arXiv:2009.14794).
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: Any = unwrap_model(kwargs["model"])
        if getattr(model.config, "feature_redraw_steps", None) is None:
            raise InputError(
                f"{type(model).__name__} has no feature_redraw_steps, so that nothing is redrawn. Set it in its "
                "config, or leave RedrawFeaturesCallback out."
            )

        if hasattr(model, "peft_config"):
            raise InputError(
                "RedrawFeaturesCallback changes the features of the model below an adapter, and an adapter is saved "
                "without them. Leave the callback out, or train the model itself."
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: Any = unwrap_model(kwargs["model"])
        number, rest = divmod(state.global_step, model.config.feature_redraw_steps)
        # the first steps go with the features that the model has, which may be those of an earlier training
        if number and rest == 0:
            model.redraw_features(number)
