"""Pictures and videos of which a vision model makes patches: what lies where, which its layers do not see."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.layer_patterns import FIELD, config_patterns
from hf_efficient_attn.attention.model_parts import ENCODER
from hf_efficient_attn.attention.untraced import run_untraced
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.exporting import is_exporting
from hf_efficient_attn.patterns.grid_base import written_shape

PICTURES = ("pixel_values", "pixel_values_videos")
# the attribute in which a model keeps the shapes of the grids of its pattern, with the pattern's spec
GRIDS = "_grid_shapes"
# the field of masked autoencoders (ViTMAE, VideoMAE), and that of those which draw themselves what they mask
MASKING, DRAWING = "norm_pix_loss", "mask_ratio"
# the field of models with a predictor (V-JEPA 2), and the argument by which a call leaves it out
PREDICTING, SKIPPING = "pred_num_hidden_layers", "skip_predictor"
# arguments by which a call says which patches its predictor reads, lists of numbers [batch, patches]
PARTS = ("context_mask", "target_mask")


def refuse_other_pictures(model: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Refuse pictures whose patches are as many as those of a grid that a layer follows, but lie otherwise.

    Args:
        model: one that has a pattern in its config.
        inputs, options: the arguments of its forward pass.

    Raises:
        InputError: such pictures or videos, or patches of which the model leaves some out.
    """
    # in an exported program sizes are not known
    if pixels_of_patches(model.config) is None or is_exporting():
        return
    run_untraced(keep_grids, model)
    grids = model.__dict__[GRIDS][1]
    if grids:
        refuse_masked_patches(model, (*inputs[1:2], options.get("bool_masked_pos")))
        if hasattr(model.config, PREDICTING) and not options.get(SKIPPING):
            refuse_open_grids(model, grids)
            # numbers of patches are not read in programs that are being compiled
            if not torch.compiler.is_compiling():
                refuse_repeated_patches(model, *(options.get(name) for name in PARTS))
        named = next((options[name] for name in PICTURES if name in options), None)
        shape = picture_shape(model.config, inputs[0] if named is None and inputs else named)
        if shape is not None:
            for grid in grids:
                check_shape(grid, shape)


def picture_shape(config: Any, pixels: Any) -> tuple[int, ...] | None:
    """Return how many patches pictures have along each axis, (rows, columns), and videos, (frames, rows, columns).

    None: these are neither, or the config does not say how large a patch is.

    pixels: [batch, channels, height, width] or [batch, frames, channels, height, width].
    """
    sizes = pixels_of_patches(config)
    if not isinstance(pixels, Tensor) or sizes is None:
        return None
    frames, height, width = sizes
    rows, columns = pixels.shape[-2] // height, pixels.shape[-1] // width
    if pixels.dim() == 4:
        return rows, columns
    return (pixels.shape[1] // frames, rows, columns) if pixels.dim() == 5 and isinstance(frames, int) else None


def pixels_of_patches(config: Any) -> tuple[Any, ...] | None:
    """Return how many frames, rows and columns of pixels are one patch; None: the config does not say.

    Frames are None in models of pictures.
    """
    side, frames = getattr(config, "patch_size", None), getattr(config, "tubelet_size", None)
    if isinstance(frames, list | tuple) and len(frames) == 3:
        # that of ViViT has all three
        return tuple(frames)
    sides = (side, side) if isinstance(side, int) else side
    return (frames, *sides) if isinstance(sides, list | tuple) and len(sides) == 2 else None


def refuse_masked_patches(model: Any, masks: tuple[Any, ...]) -> None:
    """Raise InputError for a model that follows a grid and leaves patches out, or shuffles them, before its layers.

    masks: those of patches that a call may have given.
    """
    draws = hasattr(model.config, DRAWING)
    if hasattr(model.config, MASKING) and (draws or any(each is not None for each in masks)):
        raise InputError(
            f"{type(model).__name__} leaves out masked patches{' and shuffles the others' if draws else ''}, so that "
            "they do not lie as in the grid of attention_pattern, which would take others for neighbours. Give it a "
            "pattern without a grid, or follow the grid in a model that reads all patches, as for fine-tuning."
        )


def refuse_open_grids(model: Any, grids: Sequence[Sequence[int | None]]) -> None:
    """Raise InputError for a grid of any number of frames where a predictor reads patches of two kinds in one row."""
    if any(grid[0] is None for grid in grids):
        raise InputError(
            f"The predictor of {type(model).__name__} reads patches of the context and of the target in one row, which "
            "a grid of any number of frames would take for frames. Pass skip_predictor=True, or give the grid of "
            "attention_pattern its number of frames."
        )


def refuse_repeated_patches(model: Any, contexts: Any, targets: Any) -> None:
    """Raise InputError where a predictor reads a patch twice, in the context and in the target or within one.

    As many patches as a grid has, each once, are the grid, since the predictor sorts them.
    """
    for context, target in zip(contexts or (), targets or (), strict=False):
        numbers = torch.cat((context, target), 1).sort(1).values
        if bool((numbers[:, 1:] == numbers[:, :-1]).any()):
            raise InputError(
                f"context_mask and target_mask name a patch twice, so that the rows of the predictor of "
                f"{type(model).__name__} are not those of the grid of attention_pattern. Name each patch once, or pass "
                "skip_predictor=True."
            )


def keep_grids(model: Any) -> None:
    """Have the model keep the shapes of the grids that its layers follow, read anew where it has another pattern."""
    spec = getattr(model.config, FIELD)
    if model.__dict__.get(GRIDS, (None,))[0] is not spec:
        patterns = config_patterns(spec, model.config, ENCODER) or ()
        shapes = (shape for pattern in patterns if pattern is not None for shape in pattern.grid_shapes())
        model.__dict__[GRIDS] = (spec, tuple(dict.fromkeys(shapes)))


def check_shape(grid: Sequence[int | None], shape: tuple[int, ...]) -> None:
    """Raise InputError if a picture of this shape fills a grid, but with rows of another length."""
    if fills(grid, shape) and not agree(grid, shape):
        given, wanted = written_shape(shape), written_shape(grid)
        raise InputError(
            f"The input has {given} patches, but attention_pattern has a grid of {wanted}, which would take patches of "
            f"other rows for neighbours. Give pictures of {wanted} patches, or sparsify the model with a grid of "
            f"{given}."
        )


def fills(grid: Sequence[int | None], shape: Sequence[int]) -> bool:
    """Return whether a grid has as many tokens as there are patches; layers refuse others by themselves.

    >>> fills((16, 16), (8, 32)), fills((None, 16), (8, 32)), fills((16, 16), (8, 8))
    (True, True, False)
    """
    tokens, patches = strides(grid)[-1], strides(shape)[-1]
    return patches % tokens == 0 if grid[0] is None else patches == tokens


def agree(grid: Sequence[int | None], shape: Sequence[int]) -> bool:
    """Return whether the axes of a grid are those of a picture, or parts of these (windows), or whole rows or frames.

    >>> agree((16, 16), (8, 32)), agree((2, 4, 4, 8), (8, 32)), agree((256,), (8, 32)), agree((2, 64), (2, 8, 8))
    (False, True, True, True)
    """
    of_grid, of_shape = strides(grid)[1:-1], strides(shape)[1:-1]
    return all(each in of_shape for each in of_grid) or all(each in of_grid for each in of_shape)


def strides(shape: Sequence[int | None]) -> list[int]:
    """Return how many tokens a step along each axis is, the last axis first, and then how many there are.

    It is a loop, since a compiler that keeps sizes open has no products of sequences.

    >>> strides((4, 8, 16)), strides((None, 16))
    ([1, 16, 128, 512], [1, 16, 16])
    """
    found = [1]
    for size in shape[::-1]:
        found.append(found[-1] * (size or 1))
    return found
