"""`Trainer(bf16=True)`: the README's model of spans trains and evaluates as in float32, to its precision."""

from pathlib import Path

import torch
import transformers
from training.span_runs import SIZES, build_trainer, text

import hf_efficient_attn as hea


def test_trainer_in_bfloat16_follows_float32(tmp_path: Path) -> None:
    losses = {}
    for bf16 in (False, True):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(hea.AdaptiveSpanConfig.modern(**SIZES))
        options = {"bf16": bf16, "eval_strategy": "steps", "eval_steps": 2}
        trainer = build_trainer(
            tmp_path / str(bf16), model, hea.TextSegments(text(40), 2, 8), None, [hea.SpanCallback()], **options
        )
        trainer.train()
        history = trainer.state.log_history
        losses[bf16] = torch.tensor([log[key] for log in history for key in ("loss", "eval_loss") if key in log])
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert len(losses[True]) == 6
    torch.testing.assert_close(losses[True], losses[False], rtol=torch.finfo(torch.bfloat16).eps, atol=0)
    assert not torch.equal(losses[True], losses[False])
