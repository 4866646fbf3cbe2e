"""What every family satisfies in low precision: cast, with another default dtype, or under autocast.

Encoder-decoders and sparsified models included. `test_precision_contract.py` runs it.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.shared_checks import compile_for_any_length
from models.shared_contract import without_labels
from models_cases import checkpoint_activations, first_tensor, switch_off_dropout
from torch import Tensor

from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT

# of autocast's distance from float32 to that of a model of the same low precision altogether; 1.1 was the most
SLACK = 2.0
DTYPES = (torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.thorough))


def distance(output: Any, expected: Tensor) -> float:
    """Return how far the main output of a head is from the expected one."""
    return float((first_tensor(output).float() - expected).norm())


class PrecisionContract:
    """One method a promise; `case` and `auto_class` are parametrised by `test_precision_contract.py`."""

    def test_cast_is_what_is_loaded_in_that_precision(self, own_case: Any, tmp_path: Path) -> None:
        """To the bit, and back in float32 it is what it was: no table, such as rotary frequencies, is rounded."""
        model = own_case.model()
        # so that the weights themselves lose nothing
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.copy_(tensor.bfloat16())
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        cast = copy.deepcopy(model).to(torch.bfloat16)
        for one, other in ((loaded, cast), (model, copy.deepcopy(cast).float())):
            tensors = dict(other.named_buffers()) | dict(other.named_parameters())
            for name, expected in (*one.named_buffers(), *one.named_parameters()):
                assert tensors[name].dtype == expected.dtype, name
                assert torch.equal(tensors[name], expected), name

    @pytest.mark.filterwarnings("ignore:output_attentions=True")
    def test_weights_of_a_model_in_float64_are_in_float64(self, any_case: Any) -> None:
        """And so are its outputs, which are computed from them."""
        model, inputs = any_case.model().double(), without_labels(any_case.inputs(any_case.main_head))
        with torch.no_grad():
            expected = model(**inputs, use_cache=False)
            if model.config._attn_implementation == "sdpa":
                # torch's kernel returns none
                model.set_attn_implementation("eager")
            output = model(**inputs, output_attentions=True, use_cache=False)
        torch.testing.assert_close(first_tensor(output), first_tensor(expected), atol=1e-12, rtol=1e-12)
        for name in output:
            for weights in output[name] if name.endswith("attentions") and output[name] is not None else ():
                assert weights is None or not torch.equal(weights, weights.float().double()), name

    def test_default_dtype_changes_nothing(self, any_case: Any) -> None:
        """Of a model in float32; in the low default first, since masks and plans are kept for later calls."""
        model, inputs, found = any_case.model(), any_case.inputs(any_case.main_head), []
        for default in (torch.bfloat16, torch.float32):
            own = copy.deepcopy(model).train()
            switch_off_dropout(own)
            torch.manual_seed(0)
            torch.set_default_dtype(default)
            try:
                output = own(**inputs, use_cache=False)
                output.loss.backward()
            finally:
                torch.set_default_dtype(torch.float32)
            found.append([first_tensor(output), *(parameter.grad for parameter in own.parameters())])
        for low, wide in zip(*found, strict=True):
            assert low.dtype == wide.dtype == torch.float32
            assert torch.equal(low, wide)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_autocast_is_as_near_to_float32_as_a_model_of_that_precision(self, case: Any, dtype: torch.dtype) -> None:
        # with another seed, rounding moves a few tokens of the Routing Transformer to another cluster
        model, low, inputs = case.model(seed=3), case.model(seed=3).to(dtype), case.inputs()
        switch_off_dropout(model)
        with torch.no_grad():
            expected = first_tensor(model(**inputs, use_cache=False))
            limit = SLACK * distance(low(**inputs), expected)
            for training in (False, True):
                model.train(training)
                for use_cache in (False, True):
                    with torch.autocast("cpu", dtype=dtype):
                        assert 0 < distance(model(**inputs, use_cache=use_cache), expected) < limit

    # what is trained on here is the states alone
    @pytest.mark.filterwarnings("ignore:The training loss does not include auxiliary_loss")
    def test_autocast_trains_every_head(self, case: Any, auto_class: str) -> None:
        model = case.model(auto_class).train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(**case.inputs(auto_class))
        (output["loss"] if "loss" in output else first_tensor(output).float().sum()).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.dtype == parameter.dtype == torch.float32, name
            assert parameter.grad.isfinite().all(), name

    def test_autocast_with_gradient_checkpointing_changes_no_gradient(self, case: Any) -> None:
        gradients = []
        for checkpointing in (False, True):
            model = case.model().train()
            switch_off_dropout(model)
            if checkpointing:
                checkpoint_activations(model)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**case.inputs(), use_cache=False).loss
            loss.backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for plain, checkpointed in zip(*gradients, strict=True):
            torch.testing.assert_close(checkpointed, plain)

    @pytest.mark.thorough
    def test_autocast_compiles_to_one_graph_for_all_lengths(self, compiled_case: Any) -> None:
        """Tokens alone; with masks, labels and gradients, at one length, `contract.py` compiles."""
        given = {name: each for name, each in without_labels(compiled_case.inputs()).items() if "mask" not in name}
        calls = [
            {**{name: each.repeat(1, times)[:, :tokens] for name, each in given.items()}, "use_cache": False}
            for times, tokens in ((1, 9), (2, 16), (5, 58))
        ]
        model = compiled_case.model(**compiled_case.fewest_layers)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found, num_graphs = compile_for_any_length(model, calls)
            assert num_graphs == 1
            for actual, call in zip(found, calls, strict=True):
                expected = first_tensor(model(**call))
                assert first_tensor(actual).dtype == expected.dtype
                assert distance(actual, expected.float()) < 1e-2 * float(expected.float().norm())


class PrecisionCacheContract:
    """The promises about caches, for models that only decode."""

    def test_autocast_token_by_token_equals_full_forward(self, case: Any) -> None:
        """Also where the cache was filled in another precision."""
        model, ids = case.model(), case.inputs()["input_ids"][1:]
        switches = [(first, second) for first in (True, False) for second in (True, False) if first or second]
        with torch.no_grad():
            expected = first_tensor(model(ids, use_cache=False))[:, 5:]
            limit = SLACK * distance({"logits": case.model().bfloat16()(ids).logits[:, 5:]}, expected)
            for first, second in switches:
                for cache in (
                    transformers.DynamicCache(config=model.config),
                    transformers.StaticCache(config=model.config, max_cache_len=14),
                ):
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first):
                        model(ids[:, :5], **{CACHE_ARGUMENT: cache})
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=second):
                        steps = [
                            model(ids[:, index : index + 1], **{CACHE_ARGUMENT: cache}).logits
                            for index in range(5, ids.shape[1])
                        ]
                    assert distance({"logits": torch.cat(steps, 1)}, expected) < limit

    def test_autocast_generates_with_a_static_cache(self, case: Any) -> None:
        inputs = case.inputs()
        ids, mask = inputs["input_ids"].flip(1), inputs["attention_mask"].flip(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = case.model().generate(
                ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, cache_implementation="static"
            )
        assert out.shape == (len(ids), ids.shape[1] + 3)
