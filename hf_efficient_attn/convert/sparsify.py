"""Give a saved model an attention pattern, and save it to a new folder.

    hf-efficient-attn sparsify my_llama new_llama --pattern "band(1020, 0) | global(0, 1, 2, 3)"
    hf-efficient-attn sparsify my_llama new_llama --pattern "band(1020, 0) | global(0, 1, 2, 3)" --layers every-second
    hf-efficient-attn sparsify bert-base-uncased new_bert --pattern "band(64, 64) | global(0)" --layers 0-3,8

Weights and their dtype stay as they are; config.json records the pattern, and the tokenizer and processor are copied. A
decoder uses the causal form of the pattern. Evaluate the new model on your texts, and fine-tune it if it has become
worse. In Python, hf_efficient_attn.sparsify(model, pattern) does the same with a loaded model.
"""

import argparse
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import cached_file

from hf_efficient_attn.convert.command import writing_a_checkpoint
from hf_efficient_attn.convert.destination import (
    check_destination,
    check_path,
    note_kept,
    note_leftovers,
    write_folder,
)
from hf_efficient_attn.convert.hub import check_weights, find_on_hub, give, reading, summarize
from hf_efficient_attn.convert.source import check_saved_config, check_source_name, load_tokenizer
from hf_efficient_attn.convert.weights import WEIGHT_FILES, note_mixed
from hf_efficient_attn.errors import CheckpointError, ConfigurationError, EfficientAttentionError
from hf_efficient_attn.hub.card import auto_class, described_tokens
from hf_efficient_attn.hub.saved_config import load_config
from hf_efficient_attn.integration.explain import explain, numbers, saved_class
from hf_efficient_attn.integration.layer_patterns import ENCODER, FIELD, config_patterns, num_layers
from hf_efficient_attn.integration.saving import stock_name
from hf_efficient_attn.integration.sparsify import sparsify
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.base import saved_config
from hf_efficient_attn.patterns.config_spec import parse_pattern
from hf_efficient_attn.patterns.pattern import own_classes

ALL, EVERY_SECOND = "all", "every-second"
RANGE = re.compile(r"(\d+)(?:-(\d+))?")
# processors of images, audio and video, which are copied; the tokenizer is loaded and saved
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("src", metavar="FOLDER", help="folder of a saved model, or its name on the Hub")
    parser.add_argument("dst", metavar="NEW", help="folder to write; it must be new or empty, except with --overwrite")
    parser.add_argument(
        "--pattern",
        required=True,
        metavar="EXPRESSION",
        help="the pattern, such as 'band(1020, 0) | global(0, 1, 2, 3)'; lengths are in tokens",
    )
    parser.add_argument(
        "--layers",
        default=ALL,
        metavar="LAYERS",
        help="layers that get the pattern, counted from 0: all (the default); every-second, which is 1, 3, 5, ..., so "
        "that layer 0 keeps full attention; or a list of indices and ranges such as 0-3,8. The other layers keep their "
        "own attention. Layers of an encoder-decoder are those of its encoder",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace weights, configs and tokenizer of the checkpoint in NEW; its other files and folders stay",
    )


def main(args: argparse.Namespace) -> None:
    """Sparsify the model, save it, and print what its attention costs and how to load it.

    Raises:
        ConfigurationError: a pattern or layers that do not fit the model, or a folder that cannot be written.
        CheckpointError: no such model, or weights that are missing or damaged.
        UnsupportedBackendError: a model whose attention cannot be replaced.
    """
    with writing_a_checkpoint():
        model, layers = sparsify_folder(args.src, args.dst, args.pattern, args.layers, args.overwrite)
    print(f"{args.dst}: {type(model).__name__}, {model.num_parameters():,} parameters, {model.dtype}. {layers}")
    print(_cost(model))
    auto = auto_class(model)
    own = sorted({cls.__module__ for cls in own_classes(parse_pattern(args.pattern))})
    imports = ["import hf_efficient_attn", *(f"import {module}  # defines a pattern" for module in own)]
    print("Load it with:", *(f"    {line}" for line in [*imports, f"from transformers import {auto}"]), sep="\n")
    print(f"    model = {auto}.from_pretrained({args.dst!r})")


def sparsify_folder(src: str, dst: str, pattern: str, layers: str, overwrite: bool) -> tuple[PreTrainedModel, str]:
    """Give a saved model a pattern, write it to another folder, and return it with a sentence on its layers.

    The arguments are those of the command. Destination, layers and pattern are checked before weights are loaded.
    """
    check_source_name(src)
    check_path(dst)
    give(note_leftovers(dst))
    path = check_destination(dst, overwrite, src)
    source = find_on_hub(src)
    check_saved_config(source, saved_config(source, {}))
    config = load_config(source)
    count = num_layers(config.get_text_config(), ENCODER)
    wanted = layer_indices(layers, count)
    spec = pattern if layers == ALL else [pattern if layer in wanted else None for layer in range(count)]
    sparsify(load_config(source), spec)
    model = sparsify(_load(source, config), spec)
    tokenizer = load_tokenizer(source, None)
    give([*note_mixed(model, source, model.dtype), *note_kept(path)])
    write_folder(Path(dst), lambda folder: _save(model, tokenizer, source, folder))
    text_config = model.config.get_text_config()
    # layers with a sliding window of their own get no pattern
    patterns = config_patterns(getattr(text_config, FIELD), text_config, ENCODER) or ()
    found = [layer for layer, each in enumerate(patterns) if each is not None]
    return model, f"The pattern is in {len(found)} of {count} layers: {numbers(found)}."


def layer_indices(text: str, count: int) -> Sequence[int]:
    """Return the layers that --layers names in a model with `count` layers.

    >>> [list(layer_indices(text, 6)) for text in ("all", "every-second", "0-2,5")]
    [[0, 1, 2, 3, 4, 5], [1, 3, 5], [0, 1, 2, 5]]

    Raises:
        ConfigurationError: text of another form, or a layer that the model does not have.
    """
    if text in (ALL, EVERY_SECOND):
        return range(count) if text == ALL else range(1, count, 2)
    found: set[int] = set()
    for part in text.split(","):
        match = RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigurationError(
                f"--layers {shown(text)}: {shown(part)} is not an index or a range. Give {ALL}, {EVERY_SECOND}, or "
                "indices and ranges such as 0-3,8."
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < count:
            raise ConfigurationError(
                f"--layers {shown(text)}: the model has {count} layers, 0 to {count - 1}, and {shown(part)} is not a "
                "range of them."
            )
        found.update(range(first, last + 1))
    return sorted(found)


def _load(source: str, config: Any) -> PreTrainedModel:
    """Return the model with the head that was saved, and all its weights in their dtype.

    Raises:
        ConfigurationError: transformers does not have the class that the config names.
        CheckpointError: weights that are missing, damaged or of other shapes.
    """
    model_class, [named] = saved_class(config), [*(config.architectures or ()), None][:1]
    if model_class is None or (named is not None and stock_name(named) != model_class.__name__):
        raise ConfigurationError(
            f"The config in {source} ({type(config).__name__}) names {shown(named)}, which transformers does not have. "
            "Load the model in Python with its class, and call hf_efficient_attn.sparsify."
        )
    check_weights(source, WEIGHT_FILES)
    with reading(source, f"The weights in {source}", "Copy or download the checkpoint again if it is incomplete."):
        model: PreTrainedModel
        model, info = model_class.from_pretrained(source, output_loading_info=True, dtype="auto")
    if info["missing_keys"]:
        raise CheckpointError(
            f"{source} does not have all weights of a {model_class.__name__}. Missing: "
            f"{summarize(sorted(info['missing_keys']))}. Complete the checkpoint, or correct its config.json."
        )
    if info["unexpected_keys"]:
        rest = summarize(sorted(info["unexpected_keys"]))
        give([f"Left out, because a {model_class.__name__} has no such weights: {rest}."])
    return model


def _save(model: PreTrainedModel, tokenizer: Any, source: str, folder: Path) -> None:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for name in PROCESSORS:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            shutil.copy(found, folder / name)


def _cost(model: PreTrainedModel) -> str:
    """Return what `explain` says about a sparse layer, and about all layers together."""
    try:
        tokens = described_tokens(model.config)
        answer = explain(model, tokens).answer
    except EfficientAttentionError as refusal:
        return f"The cost of its attention is unknown: {refusal}"
    sparse = f"A sparse layer at {tokens:,} tokens, computed by {answer['backend']}: {answer['cost']}."
    return f"{sparse}\nAll layers: {answer['all layers']}." if "all layers" in answer else sparse
