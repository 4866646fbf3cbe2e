"""ClippedAdagrad against a loop over float64 numbers, torch's Adagrad and its own checkpoints; its constant rate."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from training.tiny_models import one_block

import hf_efficient_attn as hea
from hf_efficient_attn.training.clipped_adagrad import constant_after_warmup

SHAPES = ((3, 4), (5,), (2, 1, 1))
STEPS = 6


def tensors(scale: float = 1.0, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    """Return gradients some of which are longer than the clip of 0.5 and some shorter."""
    return [tensor * length for tensor, length in zip(tensors(seed=step), (1.0, 0.01, 0.3), strict=True)]


def apply(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], step: int) -> None:
    for parameter, gradient in zip(parameters, gradients(step), strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()


def by_hand(start: list[float], slopes: list[list[float]], lr: float, clip: float, decay: float) -> list[float]:
    """Return one tensor's numbers after Adagrad with a clip of this tensor alone, in plain arithmetic."""
    numbers, sums = list(start), [0.0] * len(start)
    for slope in slopes:
        slope = [each + decay * number for each, number in zip(slope, numbers, strict=True)]
        length = math.sqrt(sum(each * each for each in slope))
        rate = lr * clip / (length + 1e-10) if length > clip else lr
        for index, each in enumerate(slope):
            sums[index] += each * each
            numbers[index] -= rate * each / (math.sqrt(sums[index]) + 1e-10)
    return numbers


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_six_steps_by_hand(decay: float) -> None:
    """Groups have a rate and a clip of their own; within a group each tensor is clipped alone."""
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors()]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.3, "clip": 0.05}]
    optimizer = hea.ClippedAdagrad(groups, lr=0.1, clip=0.5, weight_decay=decay)
    for step in range(STEPS):
        apply(optimizer, parameters, step)
    lengths = [gradient.norm() for step in range(STEPS) for gradient in gradients(step)]
    assert min(lengths) < 0.05 < 0.5 < max(lengths)
    for index, (parameter, start) in enumerate(zip(parameters, tensors(), strict=True)):
        slopes = [gradients(step)[index].flatten().tolist() for step in range(STEPS)]
        lr, clip = (0.1, 0.5) if index < 2 else (0.3, 0.05)
        expected = by_hand(start.flatten().tolist(), slopes, lr, clip, decay)
        assert parameter.flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_first_step_is_the_rate_scaled_by_the_clip() -> None:
    """g / √g² is the sign: each number moves by lr · clip / ‖g‖, and the sum holds the unclipped square."""
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = hea.ClippedAdagrad([parameter])
    parameter.grad = torch.tensor([3.0, -4.0], dtype=torch.float64)
    optimizer.step()
    move = 0.07 * 0.03 / 5
    assert parameter.tolist() == pytest.approx([-move, move], rel=1e-9)
    assert optimizer.state[parameter]["sum"].tolist() == [9.0, 16.0]


def test_without_clip_it_is_torch_s_adagrad() -> None:
    own, theirs = ([torch.nn.Parameter(tensor) for tensor in tensors()] for _ in range(2))
    optimizers = (
        hea.ClippedAdagrad(own, lr=0.1, clip=None, weight_decay=0.01),
        torch.optim.Adagrad(theirs, lr=0.1, weight_decay=0.01, eps=1e-10),
    )
    for step in range(STEPS):
        for optimizer, parameters in zip(optimizers, (own, theirs), strict=True):
            apply(optimizer, parameters, step)
    for one, other in zip(own, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_a_clip_of_all_gradients_together_is_another_method() -> None:
    together, alone = ([torch.nn.Parameter(tensor) for tensor in tensors()] for _ in range(2))
    for parameters, optimizer in (
        (together, torch.optim.Adagrad(together, lr=0.1)),
        (alone, hea.ClippedAdagrad(alone, lr=0.1, clip=0.5)),
    ):
        for parameter, gradient in zip(parameters, gradients(1), strict=True):
            parameter.grad = gradient
        if parameters is together:
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
    assert (together[0] - alone[0]).abs().max() > 0.01


def test_state_dict_goes_on_bit_for_bit() -> None:
    whole, halves = ([torch.nn.Parameter(tensor.float()) for tensor in tensors()] for _ in range(2))
    optimizer = hea.ClippedAdagrad(whole, clip=0.5)
    for step in range(STEPS):
        apply(optimizer, whole, step)
    first = hea.ClippedAdagrad(halves, clip=0.5)
    for step in range(STEPS // 2):
        apply(first, halves, step)
    second = hea.ClippedAdagrad(halves, lr=99.0, clip=7.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(STEPS // 2, STEPS):
        apply(second, halves, step)
    assert all(torch.equal(one, other) for one, other in zip(whole, halves, strict=True))


def test_closure_and_parameters_without_gradient() -> None:
    moved, left = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = hea.ClippedAdagrad([moved, left])

    def closure() -> torch.Tensor:
        loss = moved.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert (moved < 1).all()
    assert torch.equal(left, torch.ones(2))
    assert left not in optimizer.state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"clip": 0.0}, "give None"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.InputError, match=message):
        hea.ClippedAdagrad([torch.nn.Parameter(torch.ones(1))], **options)


def test_sparse_gradients_are_refused() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = hea.ClippedAdagrad(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(hea.InputError, match="sparse=False"):
        optimizer.step()


def test_rate_of_the_first_step_is_a_share_of_the_warm_up() -> None:
    """Of the paper's 32,000 steps of warm-up the first has lr / 32,000; transformers' schedule would give 0."""
    parameter = torch.nn.Parameter(torch.ones(1))
    for warmup_steps, expected in ((4, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]), (1, [1.0] * 6), (0, [1.0] * 6)):
        optimizer = hea.ClippedAdagrad([parameter], lr=0.07)
        schedule = constant_after_warmup(optimizer, warmup_steps)
        used = []
        for _ in expected:
            used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        assert used == pytest.approx([0.07 * share for share in expected])
    theirs = transformers.get_constant_schedule_with_warmup(hea.ClippedAdagrad([parameter]), 4)
    assert theirs.get_last_lr() == [0.0]
    with pytest.raises(hea.InputError, match="warmup_steps=-1"):
        constant_after_warmup(optimizer, -1)


def test_trainer_resumes_it(tmp_path: Path) -> None:
    """A run of four steps and one that goes on after two end with the same weights, and used the same rates."""
    ended, rates = [], []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        trainer = build_trainer(tmp_path)
        trainer.train(resume_from_checkpoint=resume)
        ended.append(trainer.model.state_dict())
        rates.append([line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line])
    assert all(torch.equal(ended[0][name], ended[1][name]) for name in ended[0])
    assert rates[0] == rates[1] == pytest.approx([0.035, 0.07, 0.07, 0.07])


def build_trainer(folder: Path) -> transformers.Trainer:
    torch.manual_seed(0)
    model = one_block(vocab_size=31)
    optimizer = hea.ClippedAdagrad(hea.optimizer_groups(model, weight_decay=0.0))
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        max_grad_norm=0.0,
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
    )
    rows = torch.randint(0, 31, (8, 8), generator=torch.Generator().manual_seed(1)).tolist()
    return transformers.Trainer(
        model=model,
        args=args,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=transformers.default_data_collator,
        optimizers=(optimizer, constant_after_warmup(optimizer, 2)),
    )
