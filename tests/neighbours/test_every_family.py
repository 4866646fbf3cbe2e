"""What users of other libraries do first, with every family: the libraries' defaults."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from families import FAMILIES, READERS, WRITERS, one_each
from models_cases import first_tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # Trainer and users compute the losses here
    pytest.mark.filterwarnings("ignore:The training loss does not include auxiliary_loss:UserWarning"),
]
SMOOTHING = 0.1
TASKS = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM", "AutoModelForMaskedLM": None}
LANGUAGE_MODELS = [
    (family, case, head)
    for cases in (WRITERS, READERS)
    for family, case in cases.items()
    for head in TASKS
    if head in case.heads and (cases is WRITERS) == (head != "AutoModelForMaskedLM")
]
every_language_model = pytest.mark.parametrize(
    ("family", "case", "head"), LANGUAGE_MODELS, ids=[f"{family}-{head[13:]}" for family, _, head in LANGUAGE_MODELS]
)
DEFAULTS = {
    "lora": lambda task: peft.LoraConfig(task_type=task),
    "dora": lambda task: peft.LoraConfig(task_type=task, use_dora=True),
    "adalora": lambda task: peft.AdaLoraConfig(task_type=task, total_step=10),
    "ia3": lambda task: peft.IA3Config(task_type=task),
}


@every_language_model
@pytest.mark.parametrize("adapts", [False, True], ids=["full", "lora"])
def test_smoothed_labels_are_those_of_the_next_token(
    family: str, case: Any, head: str, adapts: bool, tmp_path: Path
) -> None:
    """Of decoders alone; in training and evaluation."""
    model = case.model(head)
    inputs = {name: tensor for name, tensor in case.inputs(head).items() if not name.startswith("global_")}
    labels, tokens = inputs["labels"], dict(inputs)
    if model.config.is_encoder_decoder:
        # by which collators give a model what it reads where Trainer keeps the labels
        tokens["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    del tokens["labels"]
    with torch.no_grad():
        scores = model(**tokens).logits.double().log_softmax(-1)
    if head == "AutoModelForCausalLM":
        scores, labels = scores[:, :-1], labels[:, 1:]
    right = -scores.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    each = (1 - SMOOTHING) * right - SMOOTHING * scores.mean(-1)
    expected = each[labels != -100].mean().item()
    if adapts:
        # untrained, it changes nothing
        model = peft.get_peft_model(model, peft.LoraConfig(task_type=TASKS[head], target_modules="all-linear"))
    args = transformers.TrainingArguments(
        str(tmp_path), label_smoothing_factor=SMOOTHING, max_steps=1, per_device_eval_batch_size=len(labels),
        use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False,
        label_names=["labels"],
    )  # fmt: skip
    given = {**tokens, "labels": inputs["labels"]}
    rows = [{name: tensor[row] for name, tensor in given.items()} for row in range(len(labels))]
    trainer = transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.compute_loss(model.eval(), dict(given)).item() == pytest.approx(expected, rel=1e-5)
    trainer.train()


@pytest.mark.parametrize("kind", DEFAULTS)
@pytest.mark.parametrize("name", one_each())
def test_adapters_know_the_modules_of_every_family(name: str, kind: str) -> None:
    """As from_config builds them, whose maps start as papers say; of all heads."""
    case = one_each()[name]
    for head in case.heads:
        torch.manual_seed(0)
        model = peft.get_peft_model(case.heads[head](case.config()), DEFAULTS[kind](TASKS.get(head)))
        first_tensor(model(**case.inputs(head))).float().square().mean().backward()
        gradients = {each: parameter.grad for each, parameter in model.named_parameters() if parameter.requires_grad}
        assert gradients
        found = [gradient for gradient in gradients.values() if gradient is not None]
        assert all(gradient.isfinite().all() for gradient in found)
        assert any(gradient.any() for gradient in found)


def test_every_family_is_here() -> None:
    assert {family for family, *_ in LANGUAGE_MODELS} >= {family.name for family in FAMILIES}
