"""What to write instead of arguments that other attention functions have."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown

MASK = "Padding is key_mask=mask.bool(), [B, Nk] with True for tokens; who reads whom is the pattern."
CAUSAL = "Give a causal pattern: Band(n, 0) for n tokens before each, or pattern & Causal()."
SCALE = "Write scale."
# of torch, transformers and flash-attn
INSTEAD = {
    "attention_mask": MASK,
    "attn_mask": MASK,
    "mask": MASK,
    "key_padding_mask": "Write key_mask, with True for tokens and False for padding.",
    "block_mask": "Who reads whom is the pattern.",
    "is_causal": CAUSAL,
    "causal": CAUSAL,
    "window_size": "Write Band(left, right) as the pattern.",
    "sliding_window": "Write Band(left, right) as the pattern; tokens are counted without the query itself.",
    "dropout_p": "Write dropout.",
    "scaling": SCALE,
    "softmax_scale": SCALE,
    "enable_gqa": "Leave it out: k and v may have fewer heads than q.",
}


def unknown_argument(names: Iterable[str], function: Callable[..., Any]) -> InputError:
    """Return the error for the first of these names, none of which is an argument of a function.

    >>> unknown_argument(["dropout_p"], lambda dropout: ...)
    InputError("There is no argument 'dropout_p'. Write dropout.")
    >>> unknown_argument(["drop_out"], lambda q, dropout: ...)
    InputError("There is no argument 'drop_out'. Allowed are: q, dropout. Did you mean 'dropout'?")
    """
    name = next(iter(names))
    return InputError(f"There is no argument {shown(name)}. {INSTEAD.get(name) or _allowed(name, function)}")


def _allowed(name: str, function: Callable[..., Any]) -> str:
    kinds = inspect.signature(function).parameters.values()
    allowed = [each.name for each in kinds if each.kind is not each.VAR_KEYWORD]
    near = difflib.get_close_matches(name, allowed, n=1)
    return f"Allowed are: {', '.join(allowed)}.{f' Did you mean {shown(near[0])}?' if near else ''}"
