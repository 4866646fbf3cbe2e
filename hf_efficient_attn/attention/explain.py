"""How a call of attention would be computed, without computing it: the backend and why, the pairs, the cost."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_efficient_attn.attention.checks import check_dtype, check_numbers
from hf_efficient_attn.attention.explain_layers import with_all_layers
from hf_efficient_attn.attention.explained_call import explained, requested_call, with_chosen
from hf_efficient_attn.attention.explanation import Explanation
from hf_efficient_attn.attention.layer_patterns import LayerPattern, is_by_part
from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.attention.model_parts import ENCODER
from hf_efficient_attn.attention.model_requests import layer_request
from hf_efficient_attn.attention.select import AUTO
from hf_efficient_attn.attention.sharded.layer_exchange import LayerExchange, layer_exchange
from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards, shards_of, why_whole
from hf_efficient_attn.attention.unknown_arguments import refuse_unknown
from hf_efficient_attn.errors import ConfigurationError, InputError, UnsupportedBackendError
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.selected_keys import ChosenKeys
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.algebra import PerHead, Union
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.config_spec import patterns_per_layer
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.serialization import check_length

CPU = torch.device("cpu")
NUM_HEADS, HEAD_DIM = 8, 64
SELF = Band(0, 0)
PARTLY_CAUSAL = (
    "A part of the pattern is causal and the whole is not, so that the cost is over dense attention: in a causal model "
    "later keys are left out, as explain(pattern.causal()) says, or --causal on the command line."
)
SENDS_MORE = "What processes that share a text exchange in this layer is more than its pattern needs, and not forecast."


def explain(
    what: Any,
    query_tokens: int = 8192,
    key_tokens: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    num_heads: int | None = None,
    num_key_heads: int | None = None,
    head_dim: int | None = None,
    training: bool = False,
    dropout: float = 0.0,
    backend: str = AUTO,
    layer: int = 0,
    cross: bool = False,
    part: str | None = None,
    sequence_ranks: int | None = None,
    chosen: ChosenKeys | None = None,
    **unknown: NoReturn,
) -> Explanation:
    """Return which backend would compute a call of attention, why, and what it would cost.

    Nothing is computed, and the device need not exist here. Costs are estimates, over those of dense attention, which
    is causal where the layer, or else the pattern, is causal. They rank backends, and are low: what `hf-efficient-attn
    bench attention` measured on a CPU was 1.0 to 2.8 times as much.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> explanation = explain(Band(256, 256))
    >>> explanation.backend, f"{explanation.density:.1%}", explanation.baseline
    ('blocked', '6.2%', 'dense attention')

    A model or config is asked for its heads, its pattern, and whether it is causal, as attn_implementation="efficient"
    would compute it, and says what all layers cost together (`all_layers`); without an `attention_pattern` its own
    attention is explained:

    >>> import transformers
    >>> explanation = explain(transformers.LlamaConfig(num_hidden_layers=2), 1024)
    >>> explanation.pattern, explanation.call.layout.num_heads, explanation.baseline
    (Causal(), 32, 'dense causal attention')

    Of processes that share a text (`shard_sequence`), it says how many bytes each sends to others in the layer, in
    the order of their ranks:

    >>> print(explain(Band(1023, 0), 131072, num_heads=16, num_key_heads=4, sequence_ranks=4).exchange)
    halo among 4 processes, which send forward 2.00 MiB, 2.00 MiB, 2.00 MiB, 0 bytes; backward 0 bytes, 2.00 MiB, \
2.00 MiB, 2.00 MiB (with all keys at all processes: 192.00 MiB each way)

    Args:
        what: a pattern; an expression such as "band(256, 256) | global(0)"; another form of `attention_pattern` (see
            `sparsify`); or a model or config of transformers.
        query_tokens, key_tokens: length of the queries and of the keys; the queries are the last positions. None: as
            many keys as queries.
        device, dtype: of the inputs; None: those of the model, or "cpu" and float32.
        num_heads, num_key_heads, head_dim: for patterns, 8 heads of width 64 by default, and as many key heads as
            heads; a model knows them.
        training: whether gradients are needed.
        dropout, backend, cross: as for `attention`; a model's own dropout is not looked up.
        layer: index of the layer, if layers differ.
        part: "encoder" (the default) or "decoder", for encoder-decoders.
        sequence_ranks: how many processes share the text; None: as many as `shard_sequence` was told, or one.
        chosen: keys that are chosen by what tokens say, for a pattern; see `attention`. Of tensors with contents the
            pairs are counted, those of the first example, which takes memory for all pairs; of tensors on the device
            "meta", of which only the shapes matter, they are the most that there can be.

    Raises:
        InputError, ConfigurationError: lengths, heads, or a layer that the pattern or model cannot have; an argument
            that there is not.
        UnsupportedBackendError: `backend` cannot compute the call, or nothing is known about the model's attention.
    """
    refuse_unknown(unknown, explain)
    num_keys = query_tokens if key_tokens is None else key_tokens
    for name, count in {"query_tokens": query_tokens, "key_tokens": num_keys}.items():
        check_length(name, count)
    heads = {"num_heads": num_heads, "num_key_heads": num_key_heads, "head_dim": head_dim}
    line, layers = None, None
    if isinstance(what, PreTrainedModel | PreTrainedConfig):
        _refuse_given(what, {**heads, "cross": cross or None, "chosen": chosen})
        device, dtype = _place_of(what, device, dtype)
        request, line, layers = layer_request(what, layer, part, num_keys)
    elif isinstance(what, nn.Module):
        raise ConfigurationError(
            f"explain takes models of transformers, not {type(what).__name__}. Give the model itself where another "
            "library wraps it (model.module, model.get_base_model())."
        )
    else:
        request = _asked(spec_pattern(what, layer, part), layer, cross, heads)
    check_numbers(request.followed.pattern, None, dropout, None, request.followed.layer)
    dtype = torch.float32 if dtype is None else dtype
    check_dtype(dtype)
    call = requested_call(
        request, query_tokens, num_keys, _device_type(device or CPU), dtype, training, dropout, backend
    )
    call = call if chosen is None else with_chosen(call, chosen)
    shards = shards_of(what) if isinstance(what, nn.Module) else None
    ranks = _ranks(shards, sequence_ranks)
    exchange, unshared = _exchange(call, request, ranks, AUTO if shards is None else shards.mode)
    request = replace(
        request, notes=(*request.notes, *_missing_positions(request.followed.pattern, num_keys), *unshared)
    )
    said = explained(call, request, backend, line)
    said = said if layers is None else with_all_layers(said, layers.values(), backend)
    return replace(said, exchange=exchange)


def _missing_positions(pattern: Pattern, num_keys: int) -> tuple[str, ...]:
    """Return a note about the global positions that no key has; none if all have one."""
    missing = [f"{named.position}{named.unit}" for named in pattern.global_positions() if not named.is_within(num_keys)]
    if not missing:
        return ()
    some = ", ".join(missing[:3]) + ", …" * (len(missing) > 3)
    return (f"Of the global positions that the pattern names, {num_keys:,} keys lack {some}.",)


def _ranks(shards: SequenceShards | None, asked: int | None) -> int | None:
    """Return how many processes share the text, those that were asked about or those of the model; None: one has it."""
    if asked is not None:
        check_length("sequence_ranks", asked)
    elif shards is not None:
        asked = shards.size
    return None if asked == 1 else asked


def _exchange(
    call: AttentionCall, asked: LayerRequest, ranks: int | None, mode: str
) -> tuple[LayerExchange | None, tuple[str, ...]]:
    """Return what so many processes send that share the text, or why that is not said; ranks None: one has it.

    Raises:
        UnsupportedBackendError: a model that reads whole sequences.
    """
    if ranks is None:
        return None, ()
    reason = None if asked.config is None else why_whole(asked.config)
    if reason is not None:
        raise UnsupportedBackendError(f"sequence_ranks={ranks}, but this model cannot share them: {reason}")
    if asked.sends_more:
        return None, (SENDS_MORE,)
    # a choice takes all keys of a head, whatever it then reads
    call = replace(call, layout=replace(call.layout, pattern=asked.followed.pattern))
    return layer_exchange(call, asked.has_bias, ranks, mode), ()


def _refuse_given(what: Any, given: Mapping[str, Any]) -> None:
    """Raise InputError for arguments about what a model knows itself."""
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None:
        raise InputError(
            f"{name}={shown(given[name])} is given with a {type(what).__name__}, which says itself what it computes. "
            f"Leave {name} out, or explain a pattern."
        )


def _place_of(what: Any, device: Any, dtype: torch.dtype | None) -> tuple[Any, torch.dtype | None]:
    """Return device and dtype, those of a model or config if they are not given."""
    own = getattr(what, "device", None)
    # parameters that are not loaded yet have no device
    own = None if own is None or own.type == "meta" else own
    return device or own, dtype or what.dtype


def spec_pattern(spec: Any, layer: int = 0, part: str | None = None) -> Pattern:
    """Return the pattern of a layer by any form of `attention_pattern`.

    Raises:
        ConfigurationError: another form, or the layer has no pattern.
    """
    if is_by_part(spec):
        spec = spec.get(part or ENCODER)
    patterns = patterns_per_layer(spec, len(spec) if isinstance(spec, list | tuple) else layer + 1)
    pattern = patterns[layer] if layer < len(patterns) else None
    if pattern is None:
        raise ConfigurationError(f"Layer {layer} has no pattern; layers are counted from 0 to {len(patterns) - 1}.")
    return pattern


def _asked(pattern: Pattern, layer: int, cross: bool, heads: Mapping[str, int | None]) -> LayerRequest:
    num_heads = NUM_HEADS if heads["num_heads"] is None else heads["num_heads"]
    num_key_heads = num_heads if heads["num_key_heads"] is None else heads["num_key_heads"]
    head_dim = HEAD_DIM if heads["head_dim"] is None else heads["head_dim"]
    for name, count in {"num_heads": num_heads, "head_dim": head_dim, "num_key_heads": num_key_heads}.items():
        check_length(name, count)
    if num_heads % num_key_heads:
        raise InputError(f"num_key_heads={num_key_heads} does not divide num_heads={num_heads}.")
    followed = LayerPattern(pattern, layer, is_own=False, is_cross=cross)
    is_causal = pattern.is_causal and not cross
    notes = (PARTLY_CAUSAL,) if not (cross or pattern.is_causal) and _has_causal_part(pattern) else ()
    return LayerRequest(followed, num_heads, num_key_heads, head_dim, head_dim, None, is_causal=is_causal, notes=notes)


def _has_causal_part(pattern: Pattern) -> bool:
    """Return whether a pattern is causal, or one of those that it unites or gives to heads, and reads what is past."""
    if pattern == SELF:
        return False
    parts = pattern.parts if isinstance(pattern, Union | PerHead) else ()
    return pattern.is_causal or any(map(_has_causal_part, parts))


def _device_type(device: str | torch.device) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"device={shown(device)} is not one that torch knows; use 'cpu' or 'cuda'.") from error
