"""The last steps of a training read everything; evaluation, checkpoints and the trained model follow the pattern."""

from pathlib import Path
from typing import Any

import pytest
import transformers as tr
from attention_models import DECODER, token_ids
from torch import nn

import hf_efficient_attn as hea
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.layer_patterns import module_pattern
from hf_efficient_attn.patterns import BlockTopK, Causal

PATTERN = BlockTopK(4, 2)


def trained(model: Any, folder: Path, *callbacks: Any, **options: Any) -> tr.Trainer:
    rows = [{"input_ids": row, "labels": row} for row in token_ids(8, 24)]
    arguments = {"per_device_train_batch_size": 2, "max_steps": 4, "use_cpu": True, "report_to": "none", **options}
    args = tr.TrainingArguments(output_dir=str(folder), disable_tqdm=True, **arguments)
    return tr.Trainer(model, args, train_dataset=rows, eval_dataset=rows[:2], callbacks=[*callbacks])  # type: ignore[arg-type]


class Watch(tr.TrainerCallback):
    """Notes what the first layer reads in every forward pass, and whether it is training."""

    def __init__(self, layer: nn.Module) -> None:
        self.read: list[tuple[bool, Any]] = []
        layer.register_forward_hook(lambda layer, *_: self.read.append((layer.training, module_pattern(layer, True))))


def test_last_steps_read_everything(tmp_path: Path) -> None:
    model = hea.sparsify(tr.LlamaForCausalLM(tr.LlamaConfig(**DECODER)), [PATTERN, None])
    watch = Watch(model.model.layers[0].self_attn)
    trainer = trained(
        model,
        tmp_path,
        hea.FullAttentionPhase(0.5),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=3,
    )
    trainer.train()
    assert [pattern for training, pattern in watch.read if training] == [PATTERN, PATTERN, Causal(), Causal()]
    assert {pattern for training, pattern in watch.read if not training} == {PATTERN}
    saved = tr.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-3", attn_implementation="efficient")
    assert saved.config.attention_pattern == model.config.attention_pattern == [PATTERN.to_dict(), None]
    watch.read.clear()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [pattern for training, pattern in watch.read if training] == [Causal()]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be a share"):
        hea.FullAttentionPhase(10)
    model = tr.LlamaForCausalLM(tr.LlamaConfig(**DECODER))
    with pytest.raises(InputError, match="has no attention_pattern"):
        trained(model, tmp_path, hea.FullAttentionPhase()).train()
