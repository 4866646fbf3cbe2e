"""What a checkpoint with spans must agree with before and after its weights are read."""

from typing import Any

from hf_efficient_attn.errors import CheckpointError
from hf_efficient_attn.models.spans import span_modules


def check_saved_limit(saved: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Raise CheckpointError if another span limit is asked for than the saved one.

    Args:
        saved: the config of the checkpoint.
        kwargs: of `from_pretrained`.
    """
    wanted = kwargs.get("span_limit", getattr(kwargs.get("config"), "span_limit", None))
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
        CheckpointError: its spans lie outside of 0 and the limit.
    """
    for spans in span_modules(loaded[0] if isinstance(loaded, tuple) else loaded):
        spans.check()
    return loaded
