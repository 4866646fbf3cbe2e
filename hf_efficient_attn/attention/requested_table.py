"""The mask function of the "efficient" attention, which transformers calls when one of its models needs a mask."""

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from hf_efficient_attn.attention.forward_context import given_positions, whole_table
from hf_efficient_attn.attention.given_choice import is_indexed
from hf_efficient_attn.attention.key_tokens import tokens_of_keys
from hf_efficient_attn.attention.layer_patterns import NAME
from hf_efficient_attn.attention.mask_probe import MaskFunction, Probe
from hf_efficient_attn.attention.overridden import refuse_lost_padding
from hf_efficient_attn.attention.table_form import is_causal_request, with_kind
from hf_efficient_attn.attention.token_table import empty_table, write_table
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.transfer import as_lasting, bring, counted_from, derived, lasting


def requested_table(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,  # type: ignore[assignment]
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Return the token table of a mask that a model of transformers asks for, with its kind.

    Layers that choose tokens by an indexer (DSA) read a mask over all pairs: they get it, bool [batch, 1, queries,
    keys].

    transformers calls it once per forward pass and kind of mask, with the arguments of its `sdpa_mask`.

    Raises:
        InputError: a padding mask that is too short, or no tokens at all.
        UnsupportedBackendError: a mask that is not causal, bidirectional, sliding, chunked or packed attention.
    """
    if not torch.compiler.is_compiling() and 0 in (batch_size, q_length):
        raise InputError(f"There are no tokens: [batch, tokens] = [{batch_size}, {q_length}]. Leave such batches out.")
    is_causal, config = is_causal_request(kwargs), kwargs.get("config")
    lengths = (batch_size, q_length, kv_length, q_offset, kv_offset)
    if is_causal and not allow_is_causal_skip and local_size is None and is_indexed(config):
        as_matrix: Any = sdpa_mask
        asked_for = {"allow_is_causal_skip": False, "use_vmap": use_vmap, "device": device}
        return as_matrix(*lengths, mask_function, attention_mask, **asked_for)  # type: ignore[no-any-return]
    table = whole_table(config)
    if table is not None:
        return with_kind(table, is_causal)
    can_skip = allow_is_causal_skip if is_causal else kwargs["allow_is_bidirectional_skip"]
    with lasting():
        attention_mask = as_lasting(attention_mask)
        # tensors that this function, or layers later, will read on the host
        asked = (attention_mask, given_positions(config), q_offset)
        documents = None
        # without these, the mask is plain causal or bidirectional
        if local_size is not None or not can_skip:
            probe = Probe(mask_function, batch_size, counted_from(int(kv_offset), kv_length, device), use_vmap)
            documents = probe.checked_documents(is_causal, local_size, asked)
        bring(*asked)
        tokens, query_offset = tokens_of_keys(config, *lengths, attention_mask, documents, is_causal, device)
        table = write_table(tokens, query_offset, q_length if is_causal else kv_length)
        table = empty_table(batch_size, kv_length, device) if table is None else table
        refuse_lost_padding(table, NAME)
        return derived(functools.partial(with_kind, is_causal=is_causal), table)
