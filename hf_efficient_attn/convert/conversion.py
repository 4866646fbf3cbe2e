"""`convert` turns a checkpoint into one of another model type, of this package or of transformers."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from hf_efficient_attn.convert.compare import check_parity, note_exceptions
from hf_efficient_attn.convert.configs import (
    ConversionRequest,
    TheirConfig,
    lengthen,
    longest_input,
    lost_fields,
    shift,
)
from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.destination import (
    check_destination,
    check_path,
    note_kept,
    note_leftovers,
    write_folder,
)
from hf_efficient_attn.convert.hub import give, summarize
from hf_efficient_attn.convert.preflight import translate_configs
from hf_efficient_attn.convert.registry import COUNTERPARTS, resolve_target
from hf_efficient_attn.convert.source import Source, check_source_name, describe_source, load_source, load_tokenizer
from hf_efficient_attn.convert.weights import (
    build_model,
    check_missing,
    check_numbers,
    covers,
    note_mixed,
    original_of,
    to_ours,
    to_theirs,
)
from hf_efficient_attn.errors import CheckpointError
from hf_efficient_attn.messages import shown

GLOBAL_ATTENTION = ".global_attention."


def build_ours(source: Source, config: Any) -> PreTrainedModel:
    """Return the model of our family that `config` describes, with the weights of the source.

    Global projections that the source lacks are copies of the local ones.

    Raises:
        CheckpointError: weights that have no parameter, or parameters that have no weights.
    """
    weights = _without_optional(lengthen(_our_weights(source), config), source, config)
    if not getattr(config, "global_projections", False):
        dropped = [name for name in weights if GLOBAL_ATTENTION in name]
        weights = {name: tensor for name, tensor in weights.items() if name not in dropped}
        source.notes += [f"Left out, because global_projections=False: {summarize(dropped)}."] if dropped else []
    model, missing = build_model(config, source.head, weights)
    copied = [name for name in missing if GLOBAL_ATTENTION in name]
    if copied:
        model.copy_local_to_global()  # type: ignore[operator]
        source.notes.append(f"Copied from the projections that all tokens use: {summarize(copied)}.")
    copied += _copy_doubled(model, missing, source)
    rest = [name for name in missing if name not in copied]
    source.notes += check_missing(rest, (*_new_names(source), *_started(rest, source)), model)
    if source.counterpart is not None and source.counterpart.warning is not None:
        warning = source.counterpart.warning(config)
        source.notes += [warning] if warning else []
    return model


@torch.no_grad()
def _copy_doubled(model: PreTrainedModel, missing: list[str], source: Source) -> list[str]:
    """Initialize the missing parameters that the table declares as copies of others; return and note their names."""
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
        source.notes.append(f"Copied from the modules that all tokens use: {modules}.")
    return list(originals)


def _started(missing: list[str], source: Source) -> list[str]:
    """Return the missing parameters that keep their initial values because no source of this type has them."""
    counterpart = source.counterpart
    if counterpart is None:
        return []
    prefix = counterpart.our_prefix_of(source.head)
    return [name for name in missing if covers(counterpart.started, name.removeprefix(prefix))]


def _without_optional(weights: dict[str, Tensor], source: Source, config: Any) -> dict[str, Tensor]:
    """Return the weights without the optional ones that the config turns off; note those."""
    optional = {} if source.counterpart is None else source.counterpart.optional
    dropped = {name: field for name, field in optional.items() if name in weights and not getattr(config, field)}
    source.notes += [f"Left out, because {field}=False: {name}." for name, field in dropped.items()]
    return {name: tensor for name, tensor in weights.items() if name not in dropped}


def _our_weights(source: Source) -> dict[str, Tensor]:
    """Return the unchanged weights under our names; note fields and weights of the source that have no counterpart."""
    counterpart = source.counterpart
    weights = {name: tensor for name, tensor in source.model.state_dict().items() if name not in source.new_names}
    if counterpart is None:
        return weights
    source.notes += lost_fields(counterpart, source.model.config)
    renamed, unknown = to_ours(weights, counterpart.all_names(source.head))
    _check_unknown(counterpart, unknown, source, weights)
    return renamed


def _new_names(source: Source) -> tuple[str, ...]:
    """Return our names of the parameters that the source's checkpoint lacks."""
    if source.counterpart is None:
        return source.new_names
    weights = source.model.state_dict()
    new = {name: weights[name] for name in source.new_names}
    return tuple(to_ours(new, source.counterpart.all_names(source.head))[0])


def _check_unknown(counterpart: Counterpart, unknown: list[str], source: Source, weights: dict[str, Tensor]) -> None:
    """Note weights that our family lacks; raise CheckpointError for undeclared weights, and for copies that differ."""
    left = [name for name in unknown if covers(counterpart.with_prefix(counterpart.left_behind, source.head), name)]
    if left:
        source.notes.append(f"Left out, because {counterpart.family} has no such weights: {summarize(left)}.")
    prefix = counterpart.prefix_of(source.head)
    copies = {prefix + copy: prefix + original for copy, original in counterpart.copies.items()}
    differing = [name for name in unknown if name in copies and not _is_copy(weights, name, copies[name])]
    if differing:
        raise CheckpointError(
            f"{counterpart.family} has one weight for several that differ in this checkpoint: {summarize(differing)}."
        )
    quiet = (*counterpart.with_prefix(counterpart.recomputed, source.head), *copies, *counterpart.unused)
    rest = [name for name in unknown if name not in left and not covers(quiet, name)]
    if rest:
        raise CheckpointError(
            f"convert does not know these weights of {shown(counterpart.model_type)}: {summarize(rest)}."
        )


def _is_copy(weights: dict[str, Tensor], name: str, original: str) -> bool:
    return original in weights and weights[name].equal(weights[original])


def build_theirs(
    counterpart: Counterpart, theirs: TheirConfig, ours: PreTrainedModel, source: Source
) -> PreTrainedModel:
    """Return the model that `theirs` describes, with the weights of `ours`; note parameters that are newly initialized.

    Raises:
        CheckpointError: weights that the model of transformers has no parameters for.
    """
    head = source.head
    source.notes += theirs.deviations.values()
    warning = "" if counterpart.warning_there is None else counterpart.warning_there(theirs.config)
    source.notes += [warning] if warning else []
    weights = shift(dict(ours.state_dict()), getattr(ours.config, "position_offset", 0), theirs.position_offset)
    renamed, unknown = to_theirs(weights, counterpart.all_names(head))
    if unknown:
        raise CheckpointError(f"{counterpart.model_type} has no parameters for these weights: {summarize(unknown)}.")
    prefix = counterpart.prefix_of(head)
    copies = {prefix + copy: prefix + original for copy, original in counterpart.copies.items()}
    doubled = {**copies, **counterpart.unused}
    renamed |= {copy: renamed[original] for copy, original in doubled.items() if original in renamed}
    model, missing = build_model(theirs.config, head, renamed)
    missing = [name for name in missing if not covers(counterpart.with_prefix(counterpart.recomputed, head), name)]
    new = tuple(name for name in missing if covers(counterpart.with_prefix(counterpart.left_behind, head), name))
    source.notes += check_missing(missing, new, model)
    return model


def convert(
    src: str | os.PathLike[str] | PreTrainedModel,
    dst: str | os.PathLike[str] | None = None,
    *,
    to: str | None = None,
    head: str | None = None,
    max_position_embeddings: int | None = None,
    max_target_position_embeddings: int | None = None,
    attention_window: int | None = None,
    pattern: Any = None,
    global_projections: bool | None = None,
    mechanism: str | list[str] | None = None,
    parity: bool = False,
    overwrite: bool = False,
) -> PreTrainedModel:
    """Convert a checkpoint of transformers to a model of this package, or back, or to a longer one; return the model.

    Efficient models (longformer, led, big_bird, bigbird_pegasus, reformer, nystromformer) give the same outputs as
    before, or those of their paper: see `parity`. Dense models (bert, roberta, xlm-roberta, modernbert, bart, pegasus,
    marian) become sparse and long. Their outputs stay the same on inputs of at most attention_window / 2 + 1 tokens
    (257 by default), where all tokens attend to each other. bert, roberta and xlm-roberta can also become an ETC, where
    both inputs start from their weights (Ainslie et al., arXiv:2004.08483, section 4), or a compressed Transformer,
    whose layers have a `mechanism` instead of attention; both need further training. A dense model with a pattern from
    `sparsify` keeps its pattern and its length, unless you ask for others. Weights keep their dtype; if a source mixes
    dtypes, all weights get one. A warning names this, and everything that has no counterpart in the new model.

    Args:
        src: a folder, a name on the Hub, or a model in memory.
        dst: folder for the model, the tokenizer and the generation config. It is written completely or not at all,
            unless files cannot be moved; the error then says where they are. None: nothing is written.
        to: "sparse_transformer", "sparse_seq2seq", "efficient_reformer" or "compressed_transformer" (default: the one
            that fits), "etc_transformer", or a model type of transformers: "longformer", "big_bird", "led",
            "bigbird_pegasus", "reformer", "nystromformer".
        head: the Auto class that loads the source. By default the config's `architectures` say which, or the names of
            the weights if there are none. A head that the source does not have gets new weights.
        max_position_embeddings: longest input in tokens (for an encoder-decoder, longest source). Learned positions are
            copied cyclically. By default the length of the source; dense sources get at least 4,096, unless they become
            a compressed Transformer.
        max_target_position_embeddings: longest target of an encoder-decoder in tokens; by default that of the source.
        attention_window: number of tokens around itself that a token attends to, both sides together; an even number.
            It holds for every layer, except for layers of a dense source that already are sparse. By default dense
            sources get 512 and a global first token; 168 if they become an ETC.
        pattern: attention pattern instead of the window, or its expression such as "band(256, 256) | global(0)". Then
            only the pattern and a call's `global_attention_mask` give global tokens.
        global_projections: whether global tokens have their own projections of queries, keys and values, copied from
            the local ones. By default they do if the source or the target has them. False for an ETC: both inputs share
            one set of projections.
        mechanism: mechanism of the layers if a dense model becomes a compressed Transformer: one for all layers, or a
            list with one per layer: "nystrom" (default), "linformer", "linear" (with random features),
            "memory_compressed", "prior", "residual_scores"; or one of those that keep the outputs of the source:
            "pattern", "talking_heads", "collaborative_heads". The mechanisms from "prior" on follow `pattern` or
            `attention_window`; by default they attend to all tokens.
        parity: give the outputs of transformers where they differ from the paper. In BigBird: other random blocks in
            eval mode, full attention on short inputs, and no answers inside the question. In LED: no global tokens
            unless a call marks them. In Nyströmformers: full attention if there is a landmark for each token of
            segment_means_seq_len, and an inverse whose start depends on the other examples of the batch. Even so,
            outputs differ for some inputs; `convert` warns of those of your model, and
            model_cards/sparse_transformer.md lists all.

            The other outputs are compared: source and result process the same random tokens in eval mode and float32
            (at most 1,021; for dense sources at most attention_window / 2 + 1), and if outputs differ, nothing is
            written. Dropout in training is not compared, and neither are the changes that another `pattern`, window or
            `global_projections=False` makes.
        overwrite: whether `dst` may be the folder of an existing checkpoint. Its weights (also shards and pickles),
            config, generation config and tokenizer are replaced; all other files stay, such as .git, README.md or
            checkpoint-500. The source is never changed.

    Raises:
        ConfigurationError: model types, heads, lengths or patterns that do not fit each other; `dst` exists, or cannot
            be a folder next to the source.
        CheckpointError: weights are missing, left over, damaged or of other shapes, and their names are listed; with
            `parity`, outputs differ; `dst` could not be written.

    >>> from transformers import BertConfig, BertForMaskedLM
    >>> short = BertForMaskedLM(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    >>> long = convert(short, max_position_embeddings=2048)
    >>> long.config.max_position_embeddings, long.config.attention_pattern
    (2048, {'kind': 'band', 'left': 256, 'right': 256})
    """
    check_source_name(src)
    if dst is not None:
        check_path(dst)
    give(note_leftovers(dst))
    path = check_destination(dst, overwrite, src)
    config, head, is_own_head = describe_source(src, head)
    target = resolve_target(config.model_type, to)
    if global_projections is None and target in ("longformer", "led"):
        global_projections = True
    request = ConversionRequest(
        max_position_embeddings,
        max_target_position_embeddings,
        attention_window,
        pattern,
        global_projections,
        parity,
        mechanism,
    )
    configs = translate_configs(config, head, target, request)
    source = load_source(src, head, is_own_head, target)
    source.notes += [*configs.notes, *check_numbers(source.model)]
    model = build_ours(source, configs.ours)
    source.notes += note_mixed(source.model, source.path, model.dtype)
    if configs.theirs is not None:
        model = build_theirs(COUNTERPARTS[target], configs.theirs, model, source)
    if parity and (source.counterpart is not None or configs.theirs is not None):
        compared = check_parity(source, model, request, configs)
        source.notes.append(f"{note_exceptions(source.model_type, target)}{compared}")
    if model.can_generate() and source.model.can_generate():
        model.generation_config = GenerationConfig.from_dict(source.model.generation_config.to_dict())
    tokenizer = None if path is None else load_tokenizer(source.path, longest_input(configs.ours, config))
    give([*source.notes, *note_kept(path)])
    if path is not None:
        write_folder(path, lambda folder: _save(model, tokenizer, folder))
    return model


def _save(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
