"""Checks of model inputs, and the masks that attention layers get: padding, packed documents, shapes, integers."""

import operator
from collections.abc import Mapping, Set, Sized
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.attention.build_call import QueryOffset
from hf_efficient_attn.attention.layer import readable_keys
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.masks import read_table, tokens_of_keys, write_table
from hf_efficient_attn.integration.names import is_table
from hf_efficient_attn.integration.packing import parsed_starts, position_starts, warn_of_unseen_documents
from hf_efficient_attn.integration.unsupported import check_mask_values, refuse_empty
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import derived, on_host, outside_inference_mode, prefetch_to_host

# types that cannot be masks
NO_MASKS = (list, tuple, set, str, bytes, int, float)


class Movable:
    """Mixin for dataclasses that are passed to layers; accelerate moves them to a device with `to`."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Any:
        """Return a copy with all tensors on `device`."""
        this: Any = self
        held = {each.name: getattr(self, each.name) for each in fields(this)}
        return replace(this, **{name: moved(each, device, non_blocking) for name, each in held.items()})


def moved(value: Any, device: torch.device | str, non_blocking: bool) -> Any:
    """Return `value` on `device`: anything with a `to` method, also in nested tuples; other values are unchanged."""
    if isinstance(value, tuple):
        parts = [moved(each, device, non_blocking) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value


@dataclass(frozen=True)
class LayerInputs(Movable):
    """What all layers of a forward pass need to know about its keys; a family may add fields.

    The cache is a separate argument, because transformers withholds it from layers that the backward pass recomputes.

    Attributes:
        token_mask: which keys are tokens, the packed document of each, and the global tokens.
        query_offset: the position of the first query among the keys; None: the queries are the last keys.
        matrix: the mask matrix that the user gave, [B, 1, T, K]; None: there is none.
    """

    # made anew, since torch 2.11 cannot compile a default that is an object
    token_mask: TokenMask = field(default_factory=TokenMask)
    query_offset: QueryOffset = None
    matrix: Tensor | None = None


NO_INPUTS = LayerInputs()


def key_masks(
    config: Any,
    embedded: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    documents: Tensor | None,
    is_causal: bool,
) -> LayerInputs:
    """Return what attention layers need to know about the keys, the same for every layer.

    Args:
        config: the config of the model; a `PatternCache` in use must have been made for it.
        embedded: the new tokens, [B, T, hidden_size].
        attention_mask: [B, K] over cached and new tokens, 1 = token. With four dimensions it is a matrix
            [B, 1, T, K], or the token table of a step of `generate`.
        documents: [B, T], as `find_documents` returns them.
    """
    padding, matrix = attention_mask, None
    if attention_mask is not None and attention_mask.ndim == 4:
        if is_table(attention_mask):
            return LayerInputs(*read_table(attention_mask, *embedded.shape[:2], attention_mask.shape[3]))
        padding, matrix = None, attention_mask
    return LayerInputs(*token_mask_of(config, embedded, padding, cache, documents, is_causal), matrix)


def token_mask_of(
    config: Any,
    embedded: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    documents: Tensor | None,
    is_causal: bool,
) -> tuple[TokenMask, QueryOffset]:
    """Return the token mask of a call and the position of its first query; see `key_masks` for the arguments."""
    batch_size, tokens = embedded.shape[:2]
    past_tokens: int | Tensor = 0
    num_keys, first_key = tokens, 0
    if cache is not None:
        past_tokens = cache.get_seq_length()
        num_keys, first_key = cache.get_mask_sizes(tokens, 0)
    with outside_inference_mode():
        if documents is not None:
            documents = documents_of_keys(documents, num_keys)
        lengths = (batch_size, tokens, num_keys, past_tokens, first_key)
        return tokens_of_keys(config, *lengths, attention_mask, documents, is_causal, embedded.device)


def step_table(
    config: Any,
    embedded: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    is_causal: bool,
    position_ids: Tensor | None,
) -> Tensor | None:
    """Return the token table of a step of `generate` with a static cache; None: nothing is masked.

    A table, because `generate` passes on only tensors there. See `key_masks` for the arguments.
    """
    if attention_mask is not None and attention_mask.ndim == 4:
        return attention_mask
    documents = step_documents(config, position_ids, attention_mask, embedded, cache)
    token_mask, query_offset = token_mask_of(config, embedded, attention_mask, cache, documents, is_causal)
    with outside_inference_mode():
        return write_table(token_mask, query_offset, embedded.shape[1])


def find_documents(
    config: Any,
    position_ids: torch.Tensor | None,
    attention_mask: Any,
    batch_size: int,
    past_tokens: int | torch.Tensor,
) -> torch.Tensor | None:
    """Return the number of the packed document that each token belongs to, or None if nothing is packed.

    A document begins at a real token whose position continues neither from the previous real token nor from the
    previous token (masked or not). So a document continues over a hole (a masked token between others), and over the
    steps of `generate`, which counts on from the last column of a prompt even if that column is masked padding. A
    document that begins after cached tokens, whose documents are unknown, only causes a warning. With a mask matrix
    the result is None. While tracing a call without cached tokens, the result for positions is always a tensor.
    Shapes: position_ids [B or 1, T], attention_mask [B, T] → [B, T], ascending.
    """
    is_first = isinstance(past_tokens, int) and past_tokens == 0
    is_matrix = isinstance(attention_mask, dict) or (attention_mask is not None and attention_mask.ndim != 2)
    if position_ids is None or is_matrix:
        return None
    tokens = position_ids.shape[1]
    if not is_first and (is_tracing(position_ids) or tokens == 1):
        return None
    first = 0 if is_first or attention_mask is None else int(past_tokens)

    def starts_of(positions: Tensor, mask: Tensor | None) -> Tensor:
        mask = None if mask is None else mask[:, first : first + tokens].to(positions.device).bool()
        return position_starts(positions.expand(batch_size, -1), mask)

    prefetch_to_host(position_ids, attention_mask)
    starts = derived(starts_of, position_ids, attention_mask)
    if not is_tracing(starts) and not on_host(starts).any():
        return None
    if not is_first:
        warn_of_unseen_documents(config)
        return None
    return derived(lambda starts: starts.cumsum(1), starts)


def noted_documents(
    config: Any,
    position_ids: Tensor | None,
    attention_mask: Any,
    batch_size: int,
    past_tokens: int | Tensor,
    cache: Cache | None,
) -> Tensor | None:
    """Return `find_documents`; warn if new tokens follow cached documents, because they attend to all of them."""
    documents = find_documents(config, position_ids, attention_mask, batch_size, past_tokens)
    if cache is None or torch.compiler.is_compiling() or (documents is not None and is_tracing(documents)):
        return documents
    if documents is not None:
        cache.holds_documents = True
    elif getattr(cache, "holds_documents", False):
        if int(past_tokens):
            warn_of_unseen_documents(config)
        elif not isinstance(attention_mask, dict) and getattr(attention_mask, "ndim", 2) == 2:
            # the cache was emptied; other masks are those of `generate` steps, which say nothing about documents
            cache.holds_documents = False
    return documents


def step_documents(
    config: Any, position_ids: Tensor | None, attention_mask: Tensor | None, embedded: Tensor, cache: Cache | None
) -> Tensor | None:
    """Return `noted_documents` for a step of `generate`, which makes its masks before it calls the model."""
    past_tokens = 0 if cache is None else cache.get_seq_length()
    return noted_documents(config, position_ids, attention_mask, embedded.shape[0], past_tokens, cache)


def documents_of_keys(documents: Tensor, num_keys: int) -> Tensor:
    """Return the document number of every key, counted from 1, [B, T] → [B, K].

    Only a first call has documents. Keys of a static cache that are reserved for later tokens get the number 0.
    """
    return derived(lambda numbers: pad(1 + numbers, (0, num_keys - numbers.shape[1])), documents)


def prefetch_inputs(*inputs: Any) -> None:
    """Copy the masks, positions and token types of a call to the CPU, in one transfer; matrices are left out."""
    prefetch_to_host(*(each for each in inputs if isinstance(each, Tensor) and each.ndim <= 2))


def check_mask(
    attention_mask: Any, batch_size: int, tokens: int, past_tokens: int | torch.Tensor, room: int | None = None
) -> None:
    """Raise InputError for a padding mask of the wrong shape, or with values other than 0 and 1.

    room: the most columns that the mask of a first call may have, since a static cache has room for later tokens; None:
        `tokens`.
    """
    refuse_other_types(attention_mask)
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim == 4:
        return
    if attention_mask.ndim != 2:
        raise InputError(
            f"attention_mask has shape {list(attention_mask.shape)}; it must be [batch, tokens], or a mask "
            "matrix [batch, 1, queries, keys]."
        )
    if isinstance(past_tokens, int) and attention_mask.shape[1] < past_tokens + tokens:
        raise InputError(
            f"attention_mask covers {attention_mask.shape[1]} tokens, but {past_tokens} are cached and {tokens} are "
            f"new. Pass a mask of {past_tokens + tokens} columns, cached tokens first; for another text, pass an "
            "empty cache."
        )
    is_first = isinstance(past_tokens, int) and past_tokens == 0
    if attention_mask.shape[0] != batch_size or (
        is_first and attention_mask.shape[1] > (tokens if room is None else room)
    ):
        raise InputError(
            f"attention_mask has shape {list(attention_mask.shape)}; it must be [batch, tokens] = "
            f"[{batch_size}, {tokens}]."
        )
    check_mask_values(attention_mask)


def refuse_other_types(attention_mask: Any, name: str = "attention_mask") -> None:
    """Raise InputError for a mask, or another input, that is a list, an array, a string or a number.

    Other types are accepted, because they may belong to another attention implementation.
    """
    if isinstance(attention_mask, NO_MASKS) or type(attention_mask).__module__ == "numpy":
        raise InputError(
            f"{name} is of type {type(attention_mask).__name__}; pass a tensor, such as torch.as_tensor({name})."
        )


def padding_mask(attention_mask: Any, batch_size: int, advice: str, is_causal: bool = False) -> Any:
    """Return the padding mask, bool [batch, keys], that a matrix is equivalent to; other masks are unchanged.

    Args:
        attention_mask: a mask of any form; a matrix is [batch or 1, 1, queries, keys].
        advice, is_causal: see `check_open_pairs`.

    Raises:
        InputError: a matrix that masks other pairs; while compiling, any matrix, because its values are unknown.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 4 or is_table(attention_mask):
        return attention_mask
    real = readable_keys(attention_mask, batch_size)
    check_open_pairs(attention_mask, real, advice, is_causal)
    return real


def check_open_pairs(matrix: Tensor, real: Tensor, advice: str, is_causal: bool = False) -> None:
    """Raise InputError unless a matrix masks only padding, so that real tokens attend to all real tokens.

    While compiling, every matrix is refused, because its values are unknown.

    Args:
        matrix: [batch or 1, 1, queries, keys], True or 0.0 = allowed.
        real: which keys are not padding, bool [batch, keys].
        advice: the error message.
        is_causal: whether the matrix must also mask later tokens.
    """
    if torch.compiler.is_compiling() or is_tracing(matrix):
        raise InputError(
            f"attention_mask has shape {list(matrix.shape)}, but a compiled model cannot see which pairs it masks, "
            "and this model can only mask padding. Pass a padding mask [batch, tokens], or do not compile."
        )
    allowed = matrix if matrix.dtype == torch.bool else matrix == 0
    num_queries, num_keys = matrix.shape[2:]
    expected = real[:, None, None].expand(-1, -1, num_queries, -1)
    if is_causal:
        index = torch.arange(num_keys, device=matrix.device)
        expected = expected & (index <= index[num_keys - num_queries :, None])
    queries = real[:, None, num_keys - num_queries :, None]
    if bool(((allowed != expected) & queries).any()):
        raise InputError(advice)


# The shape of a model's input, token ids or embeddings.


def check_axes(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, axes: tuple[str, ...] = ("batch", "tokens")
) -> None:
    """Raise InputError unless exactly one input is given, with these axes and at least one token.

    A batch without examples is refused as well; the models of transformers cannot compute one either.

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
    """Raise InputError unless there is one position for each new token."""
    if position_ids is None:
        return
    shape = tuple(position_ids.shape)
    if len(shape) != 2 or shape[1] != tokens or shape[0] not in (1, batch_size):
        raise InputError(
            f"position_ids has shape {list(shape)}; it must be [{batch_size} or 1, {tokens}], one position for each "
            "new token."
        )


# Integers: lists, arrays and tensors from users, and the integer tensors that models take.


def check_integers(name: str, given: Any, numbered: str) -> None:
    """Raise InputError for a model input that is not an integer tensor; numbered: what it numbers, in words."""
    refuse_other_types(given, name)
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise InputError(f"{name} has dtype {given.dtype}; it must hold integers, the numbers of {numbered}.")


def entries(given: Any) -> list[Any] | None:
    """Return the entries of a list, an array or a tensor; None for anything else, such as a tensor without axes."""
    if isinstance(given, str | Mapping | Set) or not isinstance(given, Sized):
        return None
    try:
        return list(given)  # type: ignore[call-overload,no-any-return]
    except TypeError:
        return None


def whole_numbers(given: Any) -> list[int] | None:
    """Return integers of Python, numpy or torch as Python integers; None if `given` holds anything else.

    >>> whole_numbers((3, 7)), whole_numbers((3, 7.0)), whole_numbers((True, False)), whole_numbers(3)
    ([3, 7], None, None, None)
    """
    # arrays and tensors in one call
    held = entries(given.tolist() if hasattr(given, "tolist") else given)
    if held is None or isinstance(given, bytes) or any(is_truth_value(each) for each in held):
        return None
    try:
        return [operator.index(each) for each in held]
    except TypeError:
        return None


def is_truth_value(given: Any) -> bool:
    """Return whether `given` is a boolean of Python, numpy or torch."""
    return isinstance(given, bool) or str(getattr(given, "dtype", "")).endswith("bool")


# Pairs of sentences in one row: token types tell them apart, and each is a document.


def check_sentences(
    token_type_ids: Tensor | None, position_ids: Tensor | None, embedded: Tensor, options: Mapping[str, Any]
) -> None:
    """Raise InputError unless token types mark the two sentences, and nothing else sets positions or documents."""
    batch_size, tokens = embedded.shape[:2]
    if token_type_ids is None or token_type_ids.shape != (batch_size, tokens):
        shape = None if token_type_ids is None else list(token_type_ids.shape)
        raise InputError(
            f"token_type_ids has shape {shape}; with separate_sentences=True it must be [batch, tokens] = "
            f"[{batch_size}, {tokens}], 0 for tokens of the first sentence and 1 for tokens of the second."
        )
    if position_ids is not None or parsed_starts(options, batch_size, tokens) is not None:
        raise InputError(
            "With separate_sentences=True the two sentences are the documents of a row, and positions are counted "
            "within each. Leave position_ids, seq_idx and cu_seq_lens_q out."
        )
    if not is_tracing(token_type_ids) and bool((on_host(token_type_ids) >> 1).any()):
        raise InputError(
            "token_type_ids has other types than 0 and 1, but separate_sentences=True allows only two sentences."
        )


def sentence_positions(token_type_ids: Tensor, attention_mask: Any) -> Tensor:
    """Return positions [B, T], counted over the real tokens of each sentence."""
    first = token_type_ids == 0
    real = torch.ones_like(first)
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        real = attention_mask.to(first.device) != 0
    counts = [(real & each).long().cumsum(1) - 1 for each in (first, ~first)]
    return torch.where(first, *counts).clamp(min=0)
