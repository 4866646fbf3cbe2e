"""What every family satisfies on a GPU, where "auto" takes other backends than on a CPU, and autocast other kernels.

Collected only where a GPU is: `pytest -m gpu`.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import seq2seq_cases
import torch
import transformers
from backends_contract import GPU
from families import CASES, SEQ2SEQ_CASES, SPARSIFIED, one_each
from models.shared_checks import check_cached_generation
from models_cases import first_tensor, head_inputs, random_ids, switch_off_dropout
from test_pretended_cuda import IN_CALL, IN_LAYERS, LAYERS
from torch import Tensor, nn

import hf_efficient_attn as hea
from hf_efficient_attn.backends.machine_costs import on_machine

# the imports of torch's compiler warn
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
EVERY = [*CASES, *SEQ2SEQ_CASES, *SPARSIFIED.cases]
# heads are wide enough for flex
WIDTH = {"hidden_size": 64}
TOKENS, FEW_TOKENS = 48, 12
# of autocast's distance from float32 to that of a model of the same low precision altogether
SLACK = 2.0


@pytest.fixture(autouse=True)
def float32_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a compiled Trainer left behind: it switches TF32 on."""
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(backend, "allow_tf32", False)


def inputs_of(case: Any, device: str = "cuda", tokens: int = TOKENS) -> dict[str, Any]:
    make = seq2seq_cases.head_inputs if case.main_head == "AutoModelForSeq2SeqLM" else head_inputs
    inputs = make(case.main_head, 3, tokens)
    return {name: each.to(device) for name, each in inputs.items()}


def model_of(case: Any) -> Any:
    width = {"d_model": 64, "dropout": 0.0} if case.name == "bart" else WIDTH
    model = case.model(**width)
    switch_off_dropout(model)
    return model


def step(model: nn.Module, inputs: dict[str, Any], forward: Any = None) -> list[Tensor]:
    """Return loss and gradients of a step of training, in float64 on the CPU."""
    loss = (model if forward is None else forward)(**inputs, use_cache=False).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [each.detach().cpu().double() for each in (loss, *gradients) if each is not None]


@contextmanager
def flex_preferred(is_preferred: bool) -> Iterator[None]:
    """Let "auto" take flex for inputs as short as these, too, for which it would be compiled in vain."""
    costs = tuple((name, replace(each, flex=1e-3, flex_call=0.0)) for name, each in GPU.costs)
    with on_machine(replace(GPU, costs=costs)) if is_preferred else nullcontext():
        yield


@pytest.mark.parametrize("prefers_flex", [True, False], ids=["flex", "auto"])
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_training_is_as_near_to_float64_as_on_a_cpu(case: Any, prefers_flex: bool) -> None:
    exact = model_of(case).double().train()
    on_cpu, on_gpu = (copy.deepcopy(exact).float().to(device) for device in ("cpu", "cuda"))
    with hea.use_backend("reference"):
        expected = step(exact, inputs_of(case, "cpu"))
        rounded = step(on_cpu, inputs_of(case, "cpu"))
    with flex_preferred(prefers_flex):
        found = step(on_gpu, inputs_of(case))
    assert len(found) == len(expected)
    scale = max(correct.abs().max() for correct in expected)
    for correct, typical, own in zip(expected, rounded, found, strict=True):
        last_digit = torch.finfo(torch.float32).eps * max(correct.abs().max(), 0.01 * scale)
        assert (own - correct).abs().max() <= 8 * ((typical - correct).abs().max() + 4 * last_digit)


def cases_by_dtype() -> Iterator[Any]:
    """Yield every case in bfloat16, and one of each family and direction in float16."""
    for dtype, cases in ((torch.bfloat16, EVERY), (torch.float16, one_each().values())):
        for case in cases:
            yield pytest.param(case, dtype, id=f"{case.name}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("case", "dtype"), [*cases_by_dtype()])
def test_autocast_is_as_near_to_float32_as_a_model_of_that_precision(case: Any, dtype: torch.dtype) -> None:
    model = model_of(case).cuda()
    # keys that are chosen by content are the same in any precision where there are few
    low, inputs = copy.deepcopy(model).to(dtype), inputs_of(case, tokens=FEW_TOKENS)
    with torch.no_grad():
        expected = first_tensor(model(**inputs, use_cache=False))
        limit = SLACK * (first_tensor(low(**inputs, use_cache=False)).float() - expected).norm()
    model.train()
    with torch.autocast("cuda", dtype=dtype), flex_preferred(True):
        output = model(**inputs, use_cache=False)
    assert 0 < (first_tensor(output).float() - expected).norm() < limit
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("case", [case for case in CASES if case.is_causal], ids=lambda case: case.name)
def test_generation_is_that_of_a_cpu(case: Any, options: dict[str, Any]) -> None:
    model, inputs = model_of(case), {"input_ids": random_ids(2, 20), "max_new_tokens": 8, "min_new_tokens": 8}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"]).index_fill_(1, torch.arange(5), 0)
    expected = model.generate(**inputs)
    model.cuda()
    on_gpu = {name: each.cuda() if isinstance(each, Tensor) else each for name, each in inputs.items()}
    assert torch.equal(model.generate(**on_gpu, **options).cpu(), expected)
    check_cached_generation(lambda **others: model.generate(**on_gpu, **others), options)


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_a_second_step_waits_seldom(case: Any) -> None:
    """Counted by the driver; `test_pretended_cuda.py` counts more, on a pretended device."""
    model, inputs = model_of(case).cuda().train(), inputs_of(case)
    step(model, inputs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            loss = model(**inputs, use_cache=False).loss
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]
    own = [place for place in waits if "hf_efficient_attn/" in place]
    assert len(own) <= 1 + IN_CALL.get(case.name, 0) + LAYERS * IN_LAYERS.get(case.name, 0), own


# BART's own layers, which may be dropped at random, are no single graph
ROUTES = [
    each
    for each in EVERY
    if getattr(each, "shows_a_route", True) and getattr(each, "is_traced", True) and each.name != "bart"
]


@pytest.mark.parametrize("case", ROUTES, ids=lambda case: case.name)
def test_compiled_training_computes_what_eager_does(case: Any) -> None:
    model, inputs = model_of(case).cuda().train(), inputs_of(case)
    start = copy.deepcopy(model.state_dict())
    torch._dynamo.reset()
    found = step(model, inputs, torch.compile(model, fullgraph=True))
    model.load_state_dict(start)
    expected = step(model, inputs)
    scale = max(each.abs().max() for each in expected)
    for own, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(own, plain, atol=1e-5 * float(scale), rtol=1e-4)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("case", one_each().values(), ids=lambda case: case.name)
def test_trainer_trains_in_bfloat16(case: Any, is_compiled: bool, tmp_path: Any) -> None:
    inputs = inputs_of(case, "cpu")
    examples = [{name: each[row] for name, each in inputs.items()} for row in (0, 1, 2) * 2]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=3,
        bf16=True,
        torch_compile=is_compiled,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
    )
    model = case.model(**WIDTH)
    before = copy.deepcopy(model.state_dict())
    trainer = transformers.Trainer(model, arguments, train_dataset=examples)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert all(loss == loss and abs(loss) < 1e4 for loss in losses)
    after = model.state_dict()
    assert all(each.isfinite().all() for each in after.values() if each.is_floating_point())
    assert any(not torch.equal(after[name].cpu(), each) for name, each in before.items())
