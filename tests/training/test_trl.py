"""TRL's trainers, given a folder: one causal model of each family, and a sparsified one of transformers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from families import DECODERS, ENCODER_DECODERS, SPARSIFIED, WRITERS
from models_cases import TINY, switch_off_dropout
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from word_tokenizer import word_tokenizer

TEXTS = [" ".join(f"w{(7 * row + word) % 50}" for word in range(5 + row)) for row in range(4)]
# peft and TRL use names that transformers has given up
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
    # losses of preferences and rewards are TRL's own
    pytest.mark.filterwarnings("ignore:The training loss does not include auxiliary_loss:UserWarning"),
]


@pytest.fixture(scope="module", params=DECODERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with dropout, where it is of ours, and of its tokenizer.

    TRL does not find the dropout of attention in models of transformers.
    """
    folder = tmp_path_factory.mktemp(request.param)
    places = () if request.param == SPARSIFIED.name else ("embedding_dropout", "hidden_dropout", "attention_dropout")
    WRITERS[request.param].model(**dict.fromkeys(places, 0.1)).save_pretrained(folder)
    word_tokenizer(TINY["vocab_size"]).save_pretrained(folder)
    return folder


def options(tmp_path: Path, **more: Any) -> dict[str, Any]:
    common = {"max_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no", "logging_steps": 1}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False}
    return {"output_dir": str(tmp_path), **common, **quiet, **more}


def first_loss(trainer: Any) -> float:
    """Train one step; return its loss, after checking that something was learned from a finite gradient."""
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    logged = trainer.state.log_history[0]
    assert math.isfinite(logged["grad_norm"])
    assert logged["grad_norm"] > 0
    changed = [name for name, parameter in trainer.model.named_parameters() if not torch.equal(parameter, before[name])]
    assert changed
    return float(logged["loss"])


@pytest.mark.parametrize(
    ("folder", "adapts"), [*((name, False) for name in DECODERS), (DECODERS[0], True)], indirect=["folder"]
)
def test_supervised_fine_tuning(folder: Path, tmp_path: Path, adapts: bool) -> None:
    """As a newcomer calls it: in bfloat16; packed, documents in one row, told by their position_ids."""
    trainer = SFTTrainer(
        str(folder),
        args=SFTConfig(**options(tmp_path, max_length=16, packing=True)),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        peft_config=LoraConfig(task_type="CAUSAL_LM") if adapts else None,
    )
    assert math.isfinite(first_loss(trainer))


def test_preferences_start_at_the_logarithm_of_two(folder: Path, tmp_path: Path) -> None:
    """The model and its reference are the same, TRL switches dropout off, and in float32 nothing is rounded apart."""
    trainer = DPOTrainer(
        str(folder),
        args=DPOConfig(**options(tmp_path, bf16=False)),
        train_dataset=Dataset.from_dict({"prompt": TEXTS, "chosen": [" w1 w2"] * 4, "rejected": [" w3"] * 4}),
    )
    assert first_loss(trainer) == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.neighbours
def test_padded_and_padding_free_rows_have_the_losses_of_the_model(folder: Path, tmp_path: Path) -> None:
    """All texts of a batch in rows of their own and in one row, in float32 and without dropout.

    TRL computes the loss from the backbone's states.
    """
    model, tokenizer = switched_off(folder), transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer([f"{text}{tokenizer.eos_token}" for text in TEXTS], padding=True, return_tensors="pt")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    expected = model(**inputs, labels=labels).loss.item()
    size = {"per_device_train_batch_size": len(TEXTS)}
    for is_free in (False, True):
        trainer = SFTTrainer(
            switched_off(folder),
            args=SFTConfig(**options(tmp_path, bf16=False, padding_free=is_free, max_length=None, **size)),
            train_dataset=Dataset.from_dict({"text": TEXTS}),
            processing_class=tokenizer,
        )
        assert first_loss(trainer) == pytest.approx(expected, rel=1e-4)


def switched_off(folder: Path) -> Any:
    """Return the model of a folder without dropout, which has no losses but that of its task."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    switch_off_dropout(model)
    return model.eval()


@pytest.mark.neighbours
def test_rewards_with_a_reference(folder: Path, tmp_path: Path) -> None:
    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids)) for ids in completion_ids]

    trainer = GRPOTrainer(
        str(folder),
        reward_funcs=reward,
        args=GRPOConfig(**options(tmp_path, num_generations=2, max_completion_length=4, beta=0.1)),
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
    )
    assert trainer.ref_model is not None
    assert math.isfinite(first_loss(trainer))


@pytest.mark.neighbours
@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_encoders_are_shown_what_decoders_are_to_learn(family: str, tmp_path: Path) -> None:
    """Why TRL does not train encoder-decoders, although it starts: their loss is that of copying."""
    model, shown = WRITERS[family].model(), {}
    model.register_forward_pre_hook(lambda *call: shown.update(call[-1]), with_kwargs=True)
    SFTTrainer(
        model,
        args=SFTConfig(**options(tmp_path, bf16=False)),
        train_dataset=Dataset.from_dict({"prompt": TEXTS, "completion": [" w1 w2"] * 4}),
        processing_class=word_tokenizer(TINY["vocab_size"]),
    ).train()
    learned = shown["labels"] != -100
    assert learned.any()
    assert not learned.all()
    assert torch.equal(shown["input_ids"][learned], shown["labels"][learned])
