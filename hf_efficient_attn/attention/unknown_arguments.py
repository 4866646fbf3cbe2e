"""What to write instead of arguments that other attention functions have."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.tracing import shown

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
# inputs of models, and how alike a name must be that is taken for one of them misspelt: so alike that no argument of
# another library is (`mm_token_type_ids`, `decoder_attention_mask`)
INPUTS = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "token_type_ids", "use_cache")
LIKENESS = 0.92


def refuse_misspelt(names: Iterable[str]) -> None:
    """Raise InputError for the first of these arguments that is an input of models with a letter wrong.

    Models take, and ignore, arguments that they do not know, since libraries pass those of other models to all.

    >>> refuse_misspelt(["num_items_in_batch", "attention_masks"])
    Traceback (most recent call last):
    hf_efficient_attn.errors.InputError: There is no argument 'attention_masks'. Did you mean 'attention_mask'?
    """
    for name in names:
        if name not in INPUTS and (near := _misspelt(name)):
            raise InputError(f"There is no argument {name!r}. Did you mean {near!r}?")


# a compiler cannot trace the comparison
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _misspelt(name: str) -> str:
    return _near_input(name)


@functools.lru_cache(maxsize=256)
def _near_input(name: str) -> str:
    near = difflib.get_close_matches(name, INPUTS, n=1, cutoff=LIKENESS)
    return near[0] if near else ""


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
