"""Pictures and videos of which a vision model makes patches: what lies where, which its layers do not see."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_efficient_attn.attention.layer_patterns import FIELD, config_patterns
from hf_efficient_attn.attention.model_parts import ENCODER
from hf_efficient_attn.attention.trial_inputs import forward_arguments
from hf_efficient_attn.attention.untraced import run_untraced
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.exporting import is_exporting
from hf_efficient_attn.patterns.grid_base import written_shape

PICTURES = ("pixel_values", "pixel_values_videos")
# arguments of a predictor, which say what patches of a video it reads, lists of numbers [batch, patches] (V-JEPA 2)
PARTS = ("context_mask", "target_mask")
# an argument of towers that read patches of many pictures in one row: frames, rows and columns of each (Qwen2-VL)
PATCH_SHAPES = "grid_thw"
# the attributes in which what takes pictures keeps whose it is, and the shapes of the grids of a pattern with its spec
OWNER, GRIDS = "_takes_pictures_of", "_grid_shapes"
# models whose tokens begin with patches
CLASS_TOKEN_LAST = ("llama4_vision_model",)
# the field of masked autoencoders (ViTMAE, VideoMAE), and that of those which draw themselves what they mask
MASKING, DRAWING = "norm_pix_loss", "mask_ratio"


@dataclass(frozen=True)
class Owner:
    """The model whose part takes pictures: its config and the name of its class; and the arguments of the part."""

    config: Any
    name: str
    arguments: tuple[str, ...]


def watch_pictures(model: PreTrainedModel) -> None:
    """Have all parts of a model that take pictures check them, or the model itself where it alone takes them.

    Methods that call `forward` by themselves, as V-JEPA 2's `get_vision_features`, go past hooks of the model only.
    """
    # before it is built, a model has no parts
    if pixels_of_patches(model.config) is None or not model._modules:
        return
    takers = [each for each in model.modules() if takes(each)]
    for part in takers if takers == [model] else picture_parts(model):
        part.__dict__[OWNER] = Owner(model.config, type(model).__name__, arguments_of(part))
        if check_pictures not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(check_pictures, with_kwargs=True)


def picture_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules below one that take pictures, or numbers of patches; models below have their own."""
    for child in module.children():
        if not isinstance(child, PreTrainedModel):
            yield from [child] if takes(child) else picture_parts(child)


def takes(module: nn.Module) -> bool:
    """Return whether the forward pass of a module takes pictures, or numbers of patches."""
    return any(name in arguments_of(module) for name in (*PICTURES, *PARTS, PATCH_SHAPES))


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's forward pass, in their order."""
    module_class: Any = type(module)
    return (*forward_arguments(module_class),)


def check_pictures(module: nn.Module, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Refuse pictures whose patches are as many as those of a grid that a layer follows, but lie otherwise.

    Args:
        module: what takes them, of a model that may have a pattern in its config.
        inputs, options: the arguments of its forward pass.

    Raises:
        InputError: such pictures or videos, or patches of which the model leaves some out.
    """
    owner: Owner = module.__dict__[OWNER]
    # in an exported program sizes are not known
    if getattr(owner.config, FIELD, None) is None or is_exporting():
        return
    run_untraced(keep_grids, module)
    grids = module.__dict__[GRIDS][1]
    if not grids:
        return
    given = {**dict(zip(owner.arguments, inputs, strict=False)), **options}
    pictures = [name for name in PICTURES if name in owner.arguments]
    refuse_other_orders(owner, next((given.get(name) for name in pictures), None))
    if not pictures:
        refuse_open_grids(owner.name, grids)
        # numbers of patches are not read in programs that are being compiled
        if not torch.compiler.is_compiling():
            refuse_repeated_patches(owner.name, *(given.get(name) for name in PARTS))
        return
    refuse_masked_patches(owner, given.get("bool_masked_pos"))
    shape = picture_shape(owner.config, given.get(pictures[0]))
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


def refuse_masked_patches(owner: Owner, mask: Any) -> None:
    """Raise InputError for a model that follows a grid and leaves patches out, or shuffles them, before its layers.

    mask: that of patches which a call may have given.
    """
    draws = hasattr(owner.config, DRAWING)
    if hasattr(owner.config, MASKING) and (draws or mask is not None):
        raise InputError(
            f"{owner.name} leaves out masked patches{' and shuffles the others' if draws else ''}, so that "
            "they do not lie as in the grid of attention_pattern, which would take others for neighbours. Give it a "
            "pattern without a grid, or follow the grid in a model that reads all patches, as for fine-tuning."
        )


def refuse_other_orders(owner: Owner, pixels: Any) -> None:
    """Raise InputError for a model whose tokens are not a prefix and then patches, row by row."""
    config, reason = owner.config, ""
    if getattr(config, "num_windows", 1) > 1:
        reason = f"orders its patches by windows (num_windows={config.num_windows})"
    elif getattr(config, "num_detection_tokens", 0):
        reason = f"has {config.num_detection_tokens} tokens behind its patches (num_detection_tokens)"
    elif config.model_type in CLASS_TOKEN_LAST:
        reason = "has its class token behind its patches"
    elif PATCH_SHAPES in owner.arguments:
        reason = "takes patches one by one, in an order of its own"
    elif isinstance(pixels, Tensor) and pixels.dim() < 4:
        reason = (
            f"takes patches one by one, pixels of shape {list(pixels.shape)}, of which it is unknown where they lie"
        )
    if reason:
        raise InputError(
            f"{owner.name} {reason}, so that a grid in attention_pattern would take others for neighbours. Give it a "
            "pattern without a grid."
        )


def refuse_open_grids(model: str, grids: Sequence[Sequence[int | None]]) -> None:
    """Raise InputError for a grid of any number of frames where a predictor reads patches of two kinds in one row."""
    if any(grid[0] is None for grid in grids):
        raise InputError(
            f"The predictor of {model} reads patches of the context and of the target in one row, which "
            "a grid of any number of frames would take for frames. Pass skip_predictor=True, or give the grid of "
            "attention_pattern its number of frames."
        )


def refuse_repeated_patches(model: str, contexts: Any, targets: Any) -> None:
    """Raise InputError where a predictor reads a patch twice, in the context and in the target or within one.

    As many patches as a grid has, each once, are the grid, since the predictor sorts them.
    """
    for context, target in zip(contexts or (), targets or (), strict=False):
        numbers = torch.cat((context, target), 1).sort(1).values
        if bool((numbers[:, 1:] == numbers[:, :-1]).any()):
            raise InputError(
                f"context_mask and target_mask name a patch twice, so that the rows of the predictor of {model} are "
                "not those of the grid of attention_pattern. Name each patch once, or pass skip_predictor=True."
            )


def keep_grids(module: nn.Module) -> None:
    """Have a module keep the shapes of the grids that the layers of its model follow, read anew for another pattern."""
    config = module.__dict__[OWNER].config
    spec = getattr(config, FIELD)
    if module.__dict__.get(GRIDS, (None,))[0] is not spec:
        patterns = config_patterns(spec, config, ENCODER) or ()
        shapes = (shape for pattern in patterns if pattern is not None for shape in pattern.grid_shapes())
        module.__dict__[GRIDS] = (spec, tuple(dict.fromkeys(shapes)))


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
