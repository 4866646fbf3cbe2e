"""Checks of a checkpoint with spans before and after its weights are read."""

from typing import Any

from hf_efficient_attn.errors import CheckpointError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.checkpoints import saved_config
from hf_efficient_attn.models.spans.module import ADAPTIVE, DYNAMIC, span_modules

# the fields that give trained spans their meaning
MEANING = ("span", "span_ramp", "frozen_spans")


class SpanCheckpoints:
    """Mixin of models with spans: what they load was saved with the same spans, and these are within their limit."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As `PreTrainedModel.from_pretrained`.

        Raises:
            CheckpointError: the checkpoint of another family, other fields of spans than the saved ones, or spans
                outside of the limit.
        """
        check_saved_spans(saved_config(pretrained_model_name_or_path, kwargs), kwargs)
        return checked_spans_of(super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs))


def check_saved_spans(saved: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Raise CheckpointError if other spans are asked for than the saved ones.

    Args:
        saved: the config of the checkpoint.
        kwargs: of `from_pretrained`.
    """

    def asked_for(name: str) -> Any:
        return kwargs.get(name, getattr(kwargs.get("config"), name, saved.get(name)))

    is_trained = saved.get("span") in (ADAPTIVE, DYNAMIC)
    changed = [name for name in MEANING if is_trained and name in saved and asked_for(name) != saved[name]]
    if changed:
        raise CheckpointError(
            f"The checkpoint was saved with {', '.join(f'{name}={shown(saved[name])}' for name in changed)}, and "
            f"{', '.join(f'{name}={shown(asked_for(name))}' for name in changed)} is asked for: the spans that it has "
            "learned would be lost, or mean something else. Load it as it was saved; freeze_spans(model) makes "
            "constants of its spans."
        )
    wanted = asked_for("span_limit")
    old = saved.get("span_limit")
    if wanted is None or old is None or wanted == old:
        return
    raise CheckpointError(
        f"The checkpoint has span_limit={old}, and span_limit={wanted} is asked for. A span is saved as a share of the "
        f"limit, so all spans would become {wanted}/{old} = {wanted / old:g} times as long. Load it as it is, and call "
        f"set_span_limit(model, {wanted}): it sets every share to min(1, share * {old} / {wanted}) and fits the table "
        "of positions."
    )


def checked_spans_of(loaded: Any) -> Any:
    """Return what `from_pretrained` returned.

    Raises:
        CheckpointError: its spans do not lie between 0 and the limit.
    """
    for spans in span_modules(loaded[0] if isinstance(loaded, tuple) else loaded):
        spans.check()
    return loaded
