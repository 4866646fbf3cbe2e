"""A source as a model of our families: names translated, then made longer or given another pattern."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_efficient_attn.convert.configs import lost_fields
from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.load_weights import build_model, check_missing
from hf_efficient_attn.convert.notes import summarize
from hf_efficient_attn.convert.positions import lengthen
from hf_efficient_attn.convert.rename import covers, original_of, to_ours
from hf_efficient_attn.convert.source import Source
from hf_efficient_attn.errors import CheckpointError
from hf_efficient_attn.messages import shown

GLOBAL_ATTENTION = ".global_attention."


def build_ours(source: Source, config: Any) -> PreTrainedModel:
    """Return the model of our family that `config` describes. Global projections it lacks are copies of local ones.

    Raises:
        CheckpointError: weights without a place, or places without weights.
    """
    weights = _without_optional(lengthen(_our_weights(source), config), source, config)
    if not getattr(config, "global_projections", False):
        dropped = [name for name in weights if GLOBAL_ATTENTION in name]
        weights = {name: tensor for name, tensor in weights.items() if name not in dropped}
        source.notes += [f"Left behind, as global_projections=False: {summarize(dropped)}."] if dropped else []
    model, missing = build_model(config, source.head, weights)
    copied = [name for name in missing if GLOBAL_ATTENTION in name]
    if copied:
        model.copy_local_to_global()  # type: ignore[operator]
        source.notes.append(f"Copied from the projections of all tokens: {summarize(copied)}.")
    copied += _copy_doubled(model, missing, source)
    rest = [name for name in missing if name not in copied]
    source.notes += check_missing(rest, (*_new_names(source), *_started(rest, source)), model)
    if source.counterpart is not None and source.counterpart.warning is not None:
        said = source.counterpart.warning(config)
        source.notes += [said] if said else []
    return model


@torch.no_grad()
def _copy_doubled(model: PreTrainedModel, missing: list[str], source: Source) -> list[str]:
    """Give parameters without weights those of which they start as copies, by the table; return their names, noted."""
    counterpart = source.counterpart
    if counterpart is None:
        return []
    prefix, parameters = counterpart.our_prefix_of(source.head), model.state_dict()
    found = {name: original_of(name.removeprefix(prefix), counterpart.doubled) for name in missing}
    originals = {name: prefix + original for name, original in found.items() if original is not None}
    for name, original in originals.items():
        parameters[name].copy_(parameters[original])
    if originals:
        modules = summarize(dict.fromkeys(name.rpartition(".")[0] for name in originals))
        source.notes.append(f"Copied from the modules that read all tokens: {modules}.")
    return list(originals)


def _started(missing: list[str], source: Source) -> list[str]:
    """Return the parameters that keep their start values, as the source never has them."""
    counterpart = source.counterpart
    if counterpart is None:
        return []
    prefix = counterpart.our_prefix_of(source.head)
    return [name for name in missing if covers(counterpart.started, name.removeprefix(prefix))]


def _without_optional(weights: dict[str, Tensor], source: Source, config: Any) -> dict[str, Tensor]:
    """Return the weights without those that the config has no place for; note them."""
    optional = {} if source.counterpart is None else source.counterpart.optional
    dropped = {name: field for name, field in optional.items() if name in weights and not getattr(config, field)}
    source.notes += [f"Left behind, as {field}=False: {name}." for name, field in dropped.items()]
    return {name: tensor for name, tensor in weights.items() if name not in dropped}


def _our_weights(source: Source) -> dict[str, Tensor]:
    """Return the weights under our names, otherwise as they are; note fields and weights that have none."""
    counterpart = source.counterpart
    weights = {name: tensor for name, tensor in source.model.state_dict().items() if name not in source.new_names}
    if counterpart is None:
        return weights
    source.notes += lost_fields(counterpart, source.model.config)
    renamed, unknown = to_ours(weights, counterpart.all_names(source.head))
    _check_unknown(counterpart, unknown, source, weights)
    return renamed


def _new_names(source: Source) -> tuple[str, ...]:
    """Return the parameters that start anew, under our names."""
    if source.counterpart is None:
        return source.new_names
    weights = source.model.state_dict()
    new = {name: weights[name] for name in source.new_names}
    return tuple(to_ours(new, source.counterpart.all_names(source.head))[0])


def _check_unknown(counterpart: Counterpart, unknown: list[str], source: Source, weights: dict[str, Tensor]) -> None:
    """Note weights that we have no place for; refuse those that the table does not declare, and copies that differ."""
    left = [name for name in unknown if covers(counterpart.with_prefix(counterpart.left_behind, source.head), name)]
    if left:
        source.notes.append(f"Left behind, as {counterpart.family} has nothing like them: {summarize(left)}.")
    prefix = counterpart.prefix_of(source.head)
    copies = {prefix + copy: prefix + original for copy, original in counterpart.copies.items()}
    differing = [name for name in unknown if name in copies and not _is_copy(weights, name, copies[name])]
    if differing:
        raise CheckpointError(
            f"{counterpart.family} shares what this checkpoint has in several forms: {summarize(differing)}."
        )
    quiet = (*counterpart.with_prefix(counterpart.recomputed, source.head), *copies, *counterpart.unused)
    rest = [name for name in unknown if name not in left and not covers(quiet, name)]
    if rest:
        raise CheckpointError(
            f"The table of names of {shown(counterpart.model_type)} does not know these weights: {summarize(rest)}."
        )


def _is_copy(weights: dict[str, Tensor], name: str, original: str) -> bool:
    return original in weights and weights[name].equal(weights[original])
