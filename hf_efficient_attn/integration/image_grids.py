"""Checks that the patches of images and videos have the rows and columns of the grid in a vision model's pattern.

Layers get a flat sequence of patches and know only its length. The patches are computed from the config's `patch_size`,
and for videos also its `tubelet_size`. Models whose tokens are not a prefix followed by patches row by row are refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.layer_patterns import ENCODER, FIELD, config_patterns
from hf_efficient_attn.integration.trial import forward_arguments
from hf_efficient_attn.layout.tracing import is_exporting, run_untraced
from hf_efficient_attn.patterns.grid import written_shape

PIXELS = ("pixel_values", "pixel_values_videos")
# the attribute in which a model stores the spec of its pattern, the shapes of the grids, and the names of its arguments
GRIDS = "_grid_shapes"
# model types with another order of tokens → what they do instead, as the predicate of a message
OTHER_TOKENS = {
    "llama4_vision_model": "has its class token after its patches",
    "vit_mae": "drops masked patches and shuffles the others",
    "vjepa2": "has two kinds of patches in its predictor",
}


def check_images(model: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Refuse images and videos that have as many patches as a grid of the model's pattern, but in other rows.

    Raises:
        InputError: such inputs, or a model whose tokens are not a prefix followed by patches row by row.
    """
    # sizes are unknown during export
    if patch_sizes(model.config) is None or is_exporting():
        return
    run_untraced(keep_grids, model)
    _, grids, names = model.__dict__[GRIDS]
    if not grids:
        return
    given = {**dict(zip(names, inputs, strict=False)), **options}
    pixels = next((given[name] for name in PIXELS if isinstance(given.get(name), Tensor)), None)
    reason = other_tokens(model.config, names, given, pixels)
    if reason is not None:
        raise InputError(
            f"{type(model).__name__} {reason}, so a grid in attention_pattern would connect the wrong patches. Give "
            "it a pattern without a grid."
        )
    shape = () if pixels is None else num_patches(model.config, pixels)
    for grid in grids:
        if shape and fills(grid, shape) and not agree(grid, shape):
            has, wanted = written_shape(shape), written_shape(grid)
            raise InputError(
                f"The input has {has} patches, but attention_pattern has a grid of {wanted}, which would connect the "
                f"wrong patches. Pass images of {wanted} patches, or sparsify the model with a grid of {has}."
            )


def keep_grids(model: Any) -> None:
    """Store in a model the shapes of the grids that its layers follow, and update them if the pattern has changed."""
    spec = getattr(model.config, FIELD)
    if model.__dict__.get(GRIDS, (None,))[0] is not spec:
        patterns = config_patterns(spec, model.config, ENCODER) or ()
        shapes = (shape for pattern in patterns if pattern is not None for shape in pattern.grid_shapes())
        model_class: Any = type(model)
        model.__dict__[GRIDS] = (spec, tuple(dict.fromkeys(shapes)), (*forward_arguments(model_class),))


def other_tokens(config: Any, names: Sequence[str], given: Mapping[str, Any], pixels: Tensor | None) -> str | None:
    """Return why the tokens of a call are not a prefix followed by patches row by row; None: they may be."""
    if getattr(config, "num_windows", 1) > 1:
        return f"orders its patches by windows (num_windows={config.num_windows})"
    if getattr(config, "num_detection_tokens", 0):
        return f"has {config.num_detection_tokens} tokens after its patches (num_detection_tokens)"
    if config.model_type == "videomae" and given.get("bool_masked_pos") is not None:
        return "drops masked patches"
    # flattened patches of several images (Qwen2-VL) or of one image (SigLIP 2)
    if "grid_thw" in names or (pixels is not None and pixels.dim() < 4):
        return "takes single patches, in its own order"
    return OTHER_TOKENS.get(config.model_type)


def patch_sizes(config: Any) -> tuple[Any, ...] | None:
    """Return the size of a patch as (frames, rows of pixels, columns of pixels); None: the config does not say.

    Frames are None for image models.
    """
    side, frames = getattr(config, "patch_size", None), getattr(config, "tubelet_size", None)
    if isinstance(frames, list | tuple) and len(frames) == 3:
        # the tubelet_size of ViViT has all three sizes
        return tuple(frames)
    sides = (side, side) if isinstance(side, int) else side
    return (frames, *sides) if isinstance(sides, list | tuple) and len(sides) == 2 else None


def num_patches(config: Any, pixels: Tensor) -> tuple[int, ...]:
    """Return the number of patches along each axis: (rows, columns) of images, (frames, rows, columns) of videos.

    Args:
        pixels: [batch, channels, height, width] or [batch, frames, channels, height, width].
    """
    frames, height, width = patch_sizes(config) or (None, 1, 1)
    rows, columns = pixels.shape[-2] // height, pixels.shape[-1] // width
    if pixels.dim() == 5 and isinstance(frames, int):
        return pixels.shape[1] // frames, rows, columns
    return (rows, columns) if pixels.dim() == 4 else ()


def fills(grid: Sequence[int | None], shape: Sequence[int]) -> bool:
    """Return whether the number of tokens in a grid matches the number of patches; layers refuse other grids.

    >>> fills((16, 16), (8, 32)), fills((None, 16), (8, 32)), fills((16, 16), (8, 8))
    (True, True, False)
    """
    tokens, patches = strides(grid)[-1], strides(shape)[-1]
    return patches % tokens == 0 if grid[0] is None else patches == tokens


def agree(grid: Sequence[int | None], shape: Sequence[int]) -> bool:
    """Return whether the axes of a grid are the axes of an image, parts of them (windows), or whole rows or frames.

    >>> agree((16, 16), (8, 32)), agree((2, 4, 4, 8), (8, 32)), agree((256,), (8, 32)), agree((2, 64), (2, 8, 8))
    (False, True, True, True)
    """
    of_grid, of_shape = strides(grid)[1:-1], strides(shape)[1:-1]
    return all(each in of_shape for each in of_grid) or all(each in of_grid for each in of_shape)


def strides(shape: Sequence[int | None]) -> list[int]:
    """Return the stride of each axis in tokens, from the last axis to the first, followed by the number of tokens.

    This is a loop because a compiler with dynamic sizes cannot trace the product of a sequence.

    >>> strides((4, 8, 16)), strides((None, 16))
    ([1, 16, 128, 512], [1, 16, 16])
    """
    found = [1]
    for size in shape[::-1]:
        found.append(found[-1] * (size or 1))
    return found
