"""Vision models whose tokens are not a prefix and then patches, row by row: a grid is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama4.modeling_llama4 import Llama4VisionModel
from transformers.models.lw_detr.configuration_lw_detr import LwDetrViTConfig
from transformers.models.lw_detr.modeling_lw_detr import LwDetrViTBackbone
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, Grid

SIZES = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "patch_size": 4}
LINKS = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
WINDOWS = {"pretrain_image_size": 32, "num_windows": 4, "window_block_indices": []}
PICTURE = torch.zeros(1, 3, 32, 32)
FLAT = {"pixel_values": torch.zeros(1, 64, 48), "pixel_attention_mask": torch.ones(1, 64, dtype=torch.bool)}


def windows() -> Any:
    sizes = {name: each for name, each in SIZES.items() if name != "intermediate_size"}
    return LwDetrViTBackbone(LwDetrViTConfig(**sizes, **WINDOWS, image_size=32))


def tower() -> Any:
    return Qwen2VisionTransformerPretrainedModel(
        Qwen2VLVisionConfig(depth=1, embed_dim=32, hidden_size=32, num_heads=4, patch_size=4)
    )


CASES: dict[str, tuple[Callable[[], Any], int, dict[str, Any], str]] = {
    "tokens after": (
        lambda: transformers.YolosModel(transformers.YolosConfig(**SIZES, image_size=[32, 32], num_detection_tokens=3)),
        4,
        {"pixel_values": PICTURE},
        "YolosModel has 3 tokens after its patches",
    ),
    "class token after": (
        lambda: Llama4VisionModel(transformers.Llama4VisionConfig(**SIZES, **LINKS, image_size=32)),
        1,
        {"pixel_values": PICTURE},
        "has its class token after its patches",
    ),
    "windows": (windows, 0, {"pixel_values": PICTURE}, "orders its patches by windows"),
    "single patches": (
        lambda: transformers.Siglip2VisionModel(
            transformers.Siglip2VisionConfig(**SIZES, num_patches=64, vision_use_head=False)
        ),
        0,
        {**FLAT, "spatial_shapes": torch.tensor([[4, 16]])},
        "takes single patches",
    ),
    "patches of many pictures": (
        tower,
        0,
        {"hidden_states": torch.zeros(64, 96), "grid_thw": torch.tensor([[1, 8, 8]])},
        "takes single patches, in its own order",
    ),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_other_orders_are_refused_and_other_patterns_are_not(name: str) -> None:
    build, prefix_tokens, inputs, said = CASES[name]
    model = build().eval()
    if not hasattr(model.config, "num_hidden_layers"):
        pytest.skip("earlier transformers, in which Qwen2-VL's tower can be given no pattern")
    hea.sparsify(model, Grid([8, 8], [Band(1, 1)] * 2, prefix_tokens))
    with pytest.raises(hea.InputError, match=f"{said}.*Give it a pattern without a grid"):
        model(**inputs)
    hea.sparsify(model, Band(80, 80))(**inputs)
