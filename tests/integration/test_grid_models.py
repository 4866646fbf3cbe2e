"""Vision transformers of transformers whose tokens read their neighbourhood in the picture."""

import copy
from typing import Any

import pytest
import torch
import transformers as tr
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, Blocks, Dilated, Full, GlobalTokens, Grid, Pattern

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NEAR = Band(3, 3)
# configs made for 32 pixels, and tokens before the patches: a class token, and registers
MODELS: dict[str, tuple[Any, int]] = {
    "vit": (tr.ViTConfig(**TINY, image_size=32, patch_size=4), 1),
    "dinov2": (tr.Dinov2Config(**TINY, image_size=32, patch_size=4, mlp_ratio=2), 1),
    "dinov2_with_registers": (
        tr.Dinov2WithRegistersConfig(**TINY, image_size=32, patch_size=4, mlp_ratio=2, num_register_tokens=4),
        5,
    ),
}


def build(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = tr.AutoModel.from_config(copy.deepcopy(MODELS[name][0]), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model.to(dtype)


def run(name: str, model: Any, *pixels: Tensor, **options: Any) -> Tensor:
    # DINOv2 fits its positions to the picture by itself
    fitted = {"interpolate_pos_encoding": True} if name == "vit" else {}
    return model(*pixels, **fitted, **options).last_hidden_state


def masked(model: Any, pattern: Pattern, num_tokens: int) -> None:
    """Let every layer of a model with eager attention read what a pattern allows, by a mask over all pairs."""
    positions = torch.arange(num_tokens)
    reads = pattern.resolve(num_tokens).allowed(positions[:, None], positions[None])
    bias = torch.zeros(reads.shape, dtype=model.dtype).masked_fill_(~reads, -torch.inf)

    def dense(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
        scores = query @ key.transpose(-1, -2) * options["scaling"] + bias
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    tr.AttentionInterface.register("dense_grid", dense)
    model.set_attn_implementation("dense_grid")


@pytest.mark.parametrize("borders", ["cut", "shifted"])
@pytest.mark.parametrize("name", MODELS)
def test_a_picture_of_another_size_as_the_dense_model(name: str, borders: str) -> None:
    """Of 64 × 48 pixels, with gradients of the pixels and of a weight."""
    pattern = Grid([16, 12], [NEAR, Dilated(4, 4, 2)], MODELS[name][1], borders)
    pixels = torch.randn(2, 3, 64, 48, generator=torch.Generator().manual_seed(1))
    found = []
    for dtype in (torch.float64, torch.float32):
        model, own = build(name, dtype), pixels.to(dtype).requires_grad_()
        if dtype == torch.float64:
            masked(model, pattern, 16 * 12 + MODELS[name][1])
        else:
            model = hea.sparsify(model, pattern)
        states = run(name, model, own)
        # of the queries of the first layer
        weight = next(each for title, each in model.named_parameters() if "layer" in title and each.dim() == 2)
        # the squares of normalized states are all alike
        loss = (states * torch.linspace(-1, 1, states.numel(), dtype=dtype).view_as(states)).sum()
        found.append((states, *torch.autograd.grad(loss, (own, weight))))
    for exact, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-4 * float(exact.detach().abs().max()), rtol=1e-4)


def test_another_resolution_is_refused() -> None:
    model = hea.sparsify(build("vit", torch.float32), Grid([8, 8], [NEAR, NEAR], 1))
    run("vit", model, torch.randn(1, 3, 32, 32))
    with pytest.raises(hea.InputError, match="257 tokens, but .* grid of 8 × 8 need 65"):
        run("vit", model, torch.randn(1, 3, 64, 64))


@pytest.mark.parametrize(
    ("name", "grid", "size"),
    [
        ("vit", Grid([8, 8], [NEAR, NEAR], 1), (16, 64)),
        ("dinov2", Grid([8, 8], [NEAR, NEAR], 1) | GlobalTokens([0]), (64, 16)),
        ("dinov2_with_registers", Grid([None, 8], [NEAR, NEAR], 5), (32, 64)),
        # windows of 4 × 4
        ("vit", Grid([2, 4, 2, 4], [Band(0, 0), Full()] * 2, 1), (16, 64)),
    ],
)
def test_as_many_patches_in_other_rows_are_refused(name: str, grid: Pattern, size: tuple[int, int]) -> None:
    model = hea.sparsify(build(name, torch.float32), grid)
    run(name, model, torch.randn(1, 3, 32, 32))
    shape = " × ".join(str(pixels // 4) for pixels in size)
    message = f"The input has {shape} patches, but attention_pattern has a grid of .*sparsify the model with a grid of"
    with pytest.raises(hea.InputError, match=message):
        run(name, model, torch.randn(1, 3, *size))
    with pytest.raises(hea.InputError, match=message):
        run(name, model, pixel_values=torch.randn(1, 3, *size))


@pytest.mark.parametrize("grid", [Grid([64], [NEAR], 1), Blocks(Grid([4, 4], [NEAR, NEAR]), 4), Band(5, 5)])
def test_grids_without_rows_of_patches_take_any_picture(grid: Pattern) -> None:
    model = hea.sparsify(build("vit", torch.float32), grid | GlobalTokens([0]))
    pixels = torch.randn(1, 3, 16, 64 if grid.kind != "blocks" else 60)
    assert run("vit", model, pixels).isfinite().all()


def test_rows_of_a_head_and_of_a_pattern_that_is_set_later() -> None:
    """A classifier checks pictures as the model below it, and anew once it has another pattern."""
    torch.manual_seed(0)
    model = tr.AutoModelForImageClassification.from_config(copy.deepcopy(MODELS["dinov2"][0])).eval()
    wide = torch.randn(1, 3, 16, 64)
    hea.sparsify(model, Grid([8, 8], [NEAR, NEAR], 1))
    with pytest.raises(hea.InputError, match="has 4 × 16 patches, but attention_pattern has a grid of 8 × 8"):
        model(wide)
    hea.sparsify(model, Grid([4, 16], [NEAR, NEAR], 1))
    assert model(wide).logits.isfinite().all()
    with pytest.raises(hea.InputError, match="has 8 × 8 patches, but attention_pattern has a grid of 4 × 16"):
        model(torch.randn(1, 3, 32, 32))


def test_frames_and_rows_of_a_video() -> None:
    """Of 4 frames, two for each patch; a grid of whole frames says nothing about rows."""
    config = tr.VideoMAEConfig(**TINY, image_size=32, patch_size=8, num_frames=4, tubelet_size=2)
    torch.manual_seed(0)
    model, video = tr.VideoMAEModel(config).eval(), torch.randn(1, 4, 3, 32, 32)
    for shape in ([2, 4, 4], [2, 16], [2, 2, 2, 4]):
        hea.sparsify(model, Grid(shape, [Full()] * len(shape)))
        assert model(video).last_hidden_state.isfinite().all()
    hea.sparsify(model, Grid([4, 4, 2], [Full()] * 3))
    with pytest.raises(hea.InputError, match="has 2 × 4 × 4 patches, but attention_pattern has a grid of 4 × 4 × 2"):
        model(video)


def video_model(name: str) -> Any:
    """Return a model of 4 frames of 32 × 32 pixels, which are 2 × 4 × 4 patches."""
    torch.manual_seed(0)
    sizes = {**TINY, "image_size": 32}
    if name == "vivit":
        return tr.VivitModel(tr.VivitConfig(**sizes, num_frames=4, tubelet_size=[2, 8, 8])).eval()
    if name == "vjepa2":
        predictor = {"pred_hidden_size": 32, "pred_num_attention_heads": 4, "pred_num_hidden_layers": 1}
        clip = {"crop_size": 32, "frames_per_clip": 4, "patch_size": 8, "tubelet_size": 2}
        return tr.VJEPA2Model(tr.VJEPA2Config(**TINY, **clip, **predictor)).eval()
    decoder = {f"decoder_{field}": size for field, size in TINY.items()}
    if name == "vit_mae":
        return tr.ViTMAEModel(tr.ViTMAEConfig(**sizes, **decoder, patch_size=4, mask_ratio=0.5)).eval()
    config = tr.VideoMAEConfig(**sizes, **decoder, patch_size=8, num_frames=4, tubelet_size=2)
    return tr.VideoMAEForPreTraining(config).eval()


def test_tubelets_of_three_sizes() -> None:
    """ViViT has no patch_size; a video of as many patches in smaller and more frames reaches its layers."""
    video, options = torch.randn(1, 4, 3, 32, 32), {"interpolate_pos_encoding": True}
    other = torch.randn(1, 16, 3, 16, 16)
    assert video_model("vivit")(other, **options).last_hidden_state.shape == (1, 33, 32)
    for shape in ([2, 4, 4], [2, 16], [None, 4, 4]):
        model, grid = video_model("vivit"), Grid(shape, [Band(1, 1)] * len(shape), 1)
        found = hea.sparsify(model, grid)(video).last_hidden_state
        masked(hea.sparsify(model, None), grid, 33)
        torch.testing.assert_close(found, model(video).last_hidden_state, atol=1e-5, rtol=1e-5)
    for shape, given in (([4, 4, 2], video), ([2, 4, 4], other), ([None, 4, 4], other)):
        model = hea.sparsify(video_model("vivit"), Grid(shape, [Band(1, 1)] * 3, 1))
        with pytest.raises(hea.InputError, match="The input has . × . × . patches, but attention_pattern has a grid"):
            model(given, **options)


@pytest.mark.parametrize("shape", [[2, 4, 4], [None, 4, 4]])
def test_masked_autoencoders_leave_patches_out(shape: list[int | None]) -> None:
    """VideoMAE those that a call names, so that 16 are left; ViTMAE those that it draws, and it shuffles the others."""
    grid, video = Grid(shape, [Band(1, 1)] * 3), torch.randn(1, 4, 3, 32, 32)
    model, mask = hea.sparsify(video_model("videomae"), grid), torch.arange(32)[None] % 2 == 0
    for inputs, options in (((video, mask), {}), ((video,), {"bool_masked_pos": mask})):
        with pytest.raises(hea.InputError, match="VideoMAE.* drops masked patches"):
            model(*inputs, **options)
    assert model.videomae(video).last_hidden_state.isfinite().all()
    pictures = hea.sparsify(video_model("vit_mae"), Grid([None, 8], [Band(1, 1)] * 2, 1))
    with pytest.raises(hea.InputError, match="ViTMAEModel drops masked patches and shuffles the others"):
        pictures(torch.randn(1, 3, 32, 32))
    # without a grid they are read in any order
    assert hea.sparsify(model, Band(5, 5))(video, mask).logits.isfinite().all()


def test_v_jepa_2_reads_patches_of_two_kinds() -> None:
    video, model = torch.randn(1, 4, 3, 32, 32), video_model("vjepa2")
    hea.sparsify(model, Grid([2, 4, 4], [Band(1, 1)] * 3))
    with pytest.raises(hea.InputError, match="VJEPA2Model has two kinds of patches in its predictor"):
        model(video)
    assert hea.sparsify(model, Band(5, 5))(video).last_hidden_state.isfinite().all()


def test_a_model_without_a_part_that_takes_images() -> None:
    """Pixtral's own forward pass begins with a convolution."""
    config = tr.PixtralVisionConfig(**TINY, image_size=32, patch_size=4)
    model = hea.sparsify(tr.PixtralVisionModel(config).eval(), Grid([8, 8], [Band(1, 1)] * 2))
    assert model(torch.randn(1, 3, 32, 32)).last_hidden_state.isfinite().all()
    with pytest.raises(hea.InputError, match="has 4 × 16 patches, but attention_pattern has a grid of 8 × 8"):
        model(torch.randn(1, 3, 16, 64))


@pytest.mark.parametrize("attention_type", ["divided_space_time", "joint_space_time"])
def test_timesformer_has_an_attention_of_its_own(attention_type: str) -> None:
    config = tr.TimesformerConfig(**TINY, image_size=32, patch_size=8, num_frames=4, attention_type=attention_type)
    with pytest.raises(hea.UnsupportedBackendError, match="TimesformerModel does not use the attention interface"):
        hea.sparsify(tr.TimesformerModel(config), Grid([4, 4, 4], [Full()] * 3, 1))


def test_a_compiled_model_refuses_other_rows() -> None:
    """Sizes that a compiler keeps open are checked, too."""
    model = build("dinov2", torch.float32)
    del model.encoder.layer[1:]
    hea.sparsify(model, Grid([None, 8], [NEAR, NEAR], 1))
    compiled = torch.compile(model, backend="eager", dynamic=True)
    assert run("dinov2", compiled, torch.randn(1, 3, 32, 32)).isfinite().all()
    with pytest.raises(hea.InputError, match="has 8 × 16 patches, but attention_pattern has a grid of any number × 8"):
        run("dinov2", compiled, torch.randn(1, 3, 32, 64))


def test_rows_as_many_as_there_are() -> None:
    """Pictures of one width and any height."""
    model = hea.sparsify(build("dinov2", torch.float32), Grid([None, 8], [NEAR, NEAR], 1))
    for height in (32, 64):
        assert run("dinov2", model, torch.randn(1, 3, height, 32)).isfinite().all()


def test_it_is_saved_with_the_model(tmp_path: Any) -> None:
    pattern = Grid([8, 8], [NEAR, Full()], 1, "shifted")
    model, pixels = hea.sparsify(build("vit", torch.float32), pattern), torch.randn(1, 3, 32, 32)
    model.save_pretrained(tmp_path)
    again = tr.AutoModel.from_pretrained(tmp_path).eval()
    assert Pattern.from_dict(again.config.attention_pattern) == pattern
    torch.testing.assert_close(run("vit", again, pixels), run("vit", model, pixels))


def test_a_picture_is_written_token_by_token() -> None:
    """A decoder reads the rows so far, with a cache as without, and refuses to write beyond the picture."""
    grid = Grid([4, 5], [Band(2, 1), Band(1, 1)], 1)
    sizes = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = hea.SparseTransformerConfig(
        **sizes, num_attention_heads=2, is_causal=True, attention_pattern=grid, position_embedding_type="rope"
    )
    torch.manual_seed(0)
    model = tr.AutoModelForCausalLM.from_config(config).eval()
    start = torch.randint(13, (2, 3))
    options = {"max_new_tokens": 18, "do_sample": False, "pad_token_id": 0}
    written = model.generate(start, **options)
    assert torch.equal(written, model.generate(start, use_cache=False, **options))
    with pytest.raises(hea.InputError, match="22 tokens, but .* grid of 4 × 5 .* 21"):
        model(torch.randint(13, (1, 22)))
