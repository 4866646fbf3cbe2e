"""The axes of a model's input, be it token ids or embeddings."""

from torch import Tensor

from hf_efficient_attn.attention.input_checks import refuse_empty
from hf_efficient_attn.errors import InputError


def check_axes(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, axes: tuple[str, ...] = ("batch", "tokens")
) -> None:
    """Raise InputError if not exactly one input is given, if it has other axes, or no tokens at all.

    A batch without examples is refused, too, as transformers' own models cannot compute one either.

    axes: the names of the axes of input_ids; embeddings have one more.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise InputError("Pass exactly one of input_ids and inputs_embeds.")
    name, given = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
    wanted = axes if inputs_embeds is None else (*axes, "hidden_size")
    if given.ndim != len(wanted):
        raise InputError(f"{name} has shape {list(given.shape)}; it must be [{', '.join(wanted)}].")
    refuse_empty(name, given, len(axes))


def check_positions(position_ids: Tensor | None, batch_size: int, tokens: int) -> None:
    """Raise InputError for positions that are not one of each new token."""
    if position_ids is None:
        return
    shape = tuple(position_ids.shape)
    if len(shape) != 2 or shape[1] != tokens or shape[0] not in (1, batch_size):
        raise InputError(
            f"position_ids has shape {list(shape)}; it must be [{batch_size} or 1, {tokens}], a position for each new "
            "token."
        )
