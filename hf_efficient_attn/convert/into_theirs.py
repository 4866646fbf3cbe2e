"""A model of our families as one of transformers."""

from transformers import PreTrainedModel

from hf_efficient_attn.convert.configs import TheirConfig
from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.load_weights import build_model, check_missing
from hf_efficient_attn.convert.notes import summarize
from hf_efficient_attn.convert.positions import shift
from hf_efficient_attn.convert.rename import covers, to_theirs
from hf_efficient_attn.convert.source import Source
from hf_efficient_attn.errors import CheckpointError


def build_theirs(
    counterpart: Counterpart, theirs: TheirConfig, ours: PreTrainedModel, source: Source
) -> PreTrainedModel:
    """Return the model that `theirs` describes with the weights of ours; what it has beyond them starts anew, noted.

    Raises:
        CheckpointError: weights that they have no place for.
    """
    head = source.head
    source.notes += theirs.deviations.values()
    warning = "" if counterpart.warning_there is None else counterpart.warning_there(theirs.config)
    source.notes += [warning] if warning else []
    weights = shift(dict(ours.state_dict()), getattr(ours.config, "position_offset", 0), theirs.position_offset)
    renamed, unknown = to_theirs(weights, counterpart.all_names(head))
    if unknown:
        raise CheckpointError(f"{counterpart.model_type} has no place for these weights: {summarize(unknown)}.")
    prefix = counterpart.prefix_of(head)
    copies = {prefix + copy: prefix + original for copy, original in counterpart.copies.items()}
    doubled = {**copies, **counterpart.unused}
    renamed |= {copy: renamed[original] for copy, original in doubled.items() if original in renamed}
    model, missing = build_model(theirs.config, head, renamed)
    missing = [name for name in missing if not covers(counterpart.with_prefix(counterpart.recomputed, head), name)]
    new = tuple(name for name in missing if covers(counterpart.with_prefix(counterpart.left_behind, head), name))
    source.notes += check_missing(missing, new, model)
    return model
