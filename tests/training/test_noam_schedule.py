"""The paper's learning rates, in the formula, in the optimizer, and in a Trainer that resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import Dataset

import hf_efficient_attn as hea
from hf_efficient_attn.training.noam_schedule import noam_learning_rate

# steps and rates of the paper's base model, to the digits of the specification
PAPER = {1: 1.7e-7, 4000: 7.0e-4, 16_000: 3.5e-4}


class Pairs(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(3, 9) + index
        return {"input_ids": ids, "labels": ids.flip(0)}


def tiny_model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = hea.SparseSeq2SeqConfig.vanilla(**sizes, encoder_layers=1, decoder_layers=1)
    return hea.SparseSeq2SeqForConditionalGeneration(config)


@pytest.mark.parametrize(("step", "rate"), PAPER.items())
def test_rates_of_the_paper(step: int, rate: float) -> None:
    assert noam_learning_rate(step, 512) == pytest.approx(rate, rel=0.03)


def test_highest_at_the_end_of_the_warm_up() -> None:
    rates = [noam_learning_rate(step, 512, warmup_steps=50) for step in range(1, 200)]
    assert rates.index(max(rates)) + 1 == 50
    assert rates[1] == pytest.approx(2 * rates[0])
    assert rates[99] == pytest.approx(rates[49] / 2**0.5)


def test_optimizer_takes_step_one_at_rate_one() -> None:
    optimizer, schedule = hea.noam_optimizer(tiny_model(), hidden_size=512)
    used = []
    for _ in range(3):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert used == [pytest.approx(noam_learning_rate(step, 512)) for step in (1, 2, 3)]
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.9, 0.98), 1e-9)
    assert optimizer.defaults["weight_decay"] == 0


def test_trainer_uses_and_resumes_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    rates = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = tiny_model()
        trainer = transformers.Seq2SeqTrainer(
            model,
            transformers.Seq2SeqTrainingArguments(**options),
            train_dataset=Pairs(),
            optimizers=hea.noam_optimizer(model, warmup_steps=3),
        )
        trainer.train(resume_from_checkpoint=resume)
        rates.append([line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line])
    assert rates[0] == rates[1]
    assert rates[0] == [pytest.approx(noam_learning_rate(step, 16, warmup_steps=3)) for step in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": 0}, "at least 1"),
        ({"factor": 0.0}, "above 0"),
        ({"lr": 1e-3}, "factor"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.EfficientAttentionError, match=message):
        hea.noam_optimizer(tiny_model(), **options)


def test_model_without_width_or_parameters() -> None:
    with pytest.raises(hea.InputError, match="pass hidden_size"):
        hea.noam_optimizer(torch.nn.Linear(2, 2))
    with pytest.raises(hea.InputError, match="no trainable parameter"):
        hea.noam_optimizer(torch.nn.Linear(2, 2).requires_grad_(False), hidden_size=2)
