"""Train the last steps with full attention, and all others with the pattern of the model."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.modeling_utils import unwrap_model

from hf_efficient_attn.attention.layer_patterns import FIELD
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.bands import Full
from hf_efficient_attn.patterns.layers import TILE_FIELDS


class FullAttentionPhase(TrainerCallback):
    """Let layers that follow a pattern read everything in the last steps of `Trainer`, causally where they are causal.

    With 90% of the tokens read by chosen blocks and 10% by full attention, a model reaches the loss of full attention
    (MoBA, Lu et al., arXiv:2502.13189, section 3.2), both with full attention and with blocks. The pattern is back at
    the end of every step, so that evaluation, checkpoints and the model after training follow it. A training that
    resumes goes on in the phase of its step.

    last_share: the share of the steps that full attention has, from 0 to 1.

    Raises:
        InputError: another share; at the start of training, a model without a pattern.
    """

    def __init__(self, last_share: float = 0.1) -> None:
        if not isinstance(last_share, float | int) or not 0 <= last_share <= 1:
            raise InputError(f"last_share={shown(last_share)} must be a share of the steps, from 0 to 1.")
        self.last_share = last_share
        # the configs that hold a pattern, with it and with the one that reads everything
        self._specs: list[tuple[Any, Any, Any]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: Any = unwrap_model(kwargs["model"])
        configs = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
        found = [(config, getattr(config, FIELD, None)) for config in configs.values()]
        self._specs = [(config, spec, reading_everything(spec)) for config, spec in found if spec is not None]
        if not self._specs:
            raise InputError(
                f"{type(model).__name__} has no attention_pattern, so that it has full attention in all steps. Call "
                "sparsify(model, pattern) before training, or leave FullAttentionPhase out."
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= round((1 - self.last_share) * state.max_steps):
            for config, _, full in self._specs:
                setattr(config, FIELD, full)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        for config, spec, _ in self._specs:
            setattr(config, FIELD, spec)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.on_step_end(args, state, control)


def reading_everything(spec: Any) -> Any:
    """Return any form of `attention_pattern` in JSON types with `Full()` instead of each pattern.

    >>> reading_everything([None, {"kind": "block_top_k", "block_tokens": 64, "num_chosen": 3}])
    [None, {'kind': 'full'}]
    """
    if spec is None:
        return None
    if isinstance(spec, list):
        return [reading_everything(entry) for entry in spec]
    if "kind" in spec:
        return Full().to_dict()
    if set(spec) >= TILE_FIELDS:
        return {**spec, "patterns": reading_everything(spec["patterns"])}
    return {name: reading_everything(entry) for name, entry in spec.items()}
