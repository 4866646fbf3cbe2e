"""What to write instead of arguments that other attention functions have."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown

# what is said in place of a name, and the arguments of which a function must have one for that to be of use
MASK = "Padding is key_mask=mask.bool(), [B, Nk] with True for tokens; who reads whom is the pattern.", ("key_mask",)
CAUSAL = "Give a causal pattern: Band(n, 0) for n tokens before each, or pattern & Causal().", ("pattern", "what")
SCALE = "Write scale.", ("scale",)
# of torch, transformers and flash-attn
INSTEAD = {
    "attention_mask": MASK,
    "attn_mask": MASK,
    "mask": MASK,
    "key_padding_mask": ("Write key_mask, with True for tokens and False for padding.", ("key_mask",)),
    "block_mask": ("Who reads whom is the pattern.", ("pattern", "what")),
    "is_causal": CAUSAL,
    "causal": CAUSAL,
    "window_size": ("Write Band(left, right) as the pattern.", ("pattern", "what")),
    "sliding_window": (
        "Write Band(left, right) as the pattern; tokens are counted without the query itself.",
        ("pattern", "what"),
    ),
    "dropout_p": ("Write dropout.", ("dropout",)),
    "scaling": SCALE,
    "softmax_scale": SCALE,
    "tokens": ("Write query_tokens, and key_tokens if there are more keys.", ("query_tokens",)),
    "length": ("Write query_tokens, and key_tokens if there are more keys.", ("query_tokens",)),
    "enable_gqa": ("Leave it out: k and v may have fewer heads than q.", ("k",)),
}


def refuse_unknown(names: Iterable[str], function: Callable[..., Any]) -> None:
    """Raise InputError for the first of these names, none of which is an argument of a function.

    >>> refuse_unknown(["dropout_p"], lambda dropout: ...)
    Traceback (most recent call last):
    hf_efficient_attn.errors.InputError: There is no argument 'dropout_p'. Write dropout.
    >>> refuse_unknown(["layr"], lambda q, layer: ...)
    Traceback (most recent call last):
    hf_efficient_attn.errors.InputError: There is no argument 'layr'. Allowed are: q, layer. Did you mean 'layer'?
    """
    for name in names:
        raise InputError(_refusal(name, function))


# torch before 2.13 cannot trace it
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refusal(name: str, function: Callable[..., Any]) -> str:
    kinds = inspect.signature(function).parameters.values()
    allowed = [each.name for each in kinds if each.kind is not each.VAR_KEYWORD]
    instead, arguments = INSTEAD.get(name, ("", ()))
    if not any(each in allowed for each in arguments):
        near = difflib.get_close_matches(name, allowed, n=1)
        instead = f"Allowed are: {', '.join(allowed)}.{f' Did you mean {shown(near[0])}?' if near else ''}"
    return f"There is no argument {shown(name)}. {instead}"
