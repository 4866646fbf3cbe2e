"""The spec's test 13: copying the token k before makes the one head that is needed grow, and no other."""

from typing import Any

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.module import span_modules
from hf_efficient_attn.models.spans.training import max_span

VOCAB, TOKENS, RAMP, LIMIT = 8, 96, 8, 64


def runs(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return tokens [rows, TOKENS] that last for 16 places on average.

    So a nearer token says something of the one k before, and every longer span helps a little; among independent
    tokens nothing would, before the ramp reaches k.
    """
    is_new = torch.rand(rows, TOKENS, generator=generator) < 1 / 16
    tokens = torch.randint(0, VOCAB, (rows, TOKENS), generator=generator)
    first = torch.where(is_new, torch.arange(TOKENS), 0).cummax(1).values
    return tokens.gather(1, first)


def batch(distance: int, rows: int, generator: torch.Generator) -> dict[str, Any]:
    """Return a text whose target is, everywhere, the token `distance` before the place that predicts."""
    ids = runs(rows, generator)
    target = torch.nn.functional.pad(ids[:, :-distance], (distance, 0), value=-100)
    return {"input_ids": ids, "labels": ids, "shift_labels": target, "use_cache": False}


def train(distance: int, seed: int, steps: int) -> tuple[Any, dict[str, Any]]:
    """Return a trained model of one layer and two heads in eval mode, and a batch it has not seen."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    config = hea.AdaptiveSpanConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        span_limit=LIMIT,
        span_ramp=RAMP,
        span_penalty=4e-3,
    )
    model = hea.AdaptiveSpanForCausalLM(config).train()
    optimizer = torch.optim.AdamW(hea.optimizer_groups(model, 0.0, span_lr=1e-2), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch(distance, 16, generator)).loss.backward()
        optimizer.step()
    return model.eval(), batch(distance, 64, generator)


@pytest.mark.parametrize("seed", [3, 4])
def test_one_head_grows_until_it_reads_the_token(seed: int) -> None:
    distance = 24
    model, unseen = train(distance, seed, steps=200)
    (spans,) = span_modules(model)
    short, long = spans.head_spans().sort().values.tolist()
    # from 0, where the ramp ends at a distance of 8
    assert max_span(model) >= distance
    assert long < distance
    assert short < 1
    with torch.no_grad():
        assert model(**unseen).loss < 0.3
        spans.ratio.zero_()
        assert model(**unseen).loss > 1.0


def test_no_head_grows_for_what_the_ramp_already_reads() -> None:
    model, unseen = train(6, seed=3, steps=100)
    with torch.no_grad():
        assert model(**unseen).loss < 0.1
    assert span_modules(model)[0].head_spans().max() < 1
