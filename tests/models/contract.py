"""What every family satisfies: DESIGN.md section 6, line by line. `test_contract.py` runs it for every case.

Its promises about folders, masks and graphs, and those that encoder-decoders keep, too, stand in files of their own.
"""

import inspect
from contextlib import nullcontext

import pytest
import torch
from models.compile_contract import CompileContract
from models.masks_contract import MasksContract
from models.saving_contract import SavingContract
from models_cases import TOLERANCE, Case, checkpoint_activations, head_inputs, random_ids, scalar
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_efficient_attn as hea


class FamilyContract(SavingContract, MasksContract, CompileContract):
    """One method a promise; `case` and `auto_class` are parametrised by `test_contract.py`."""

    def test_names_that_parallelism_relies_on(self, routed_case: Case) -> None:
        backbone = routed_case.model("AutoModel")
        assert {"embed_tokens", "layers", "norm"} <= dict(backbone.named_children()).keys()
        assert {type(layer).__name__ for layer in backbone.layers} == set(backbone._no_split_modules)
        assert all(isinstance(layer, GradientCheckpointingLayer) for layer in backbone.layers)
        assert backbone._supports_context_parallel is False
        assert isinstance(routed_case.model()._tied_weights_keys, dict)

    def test_heads_take_inputs_in_the_usual_order(self, case: Case, auto_class: str) -> None:
        """Trainer passes on only the columns a forward names, and people pass the first two by position."""
        parameters = list(inspect.signature(case.heads[auto_class].forward).parameters)
        assert parameters[1:3] == ["input_ids", "attention_mask"]
        assert {"position_ids", "inputs_embeds"} <= set(parameters)

    def test_eager_agrees_with_sdpa(self, routed_case: Case) -> None:
        self.compare_kernels(routed_case, "eager")

    # compiling flex meets deprecations inside torch itself, and in how transformers calls create_block_mask
    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without:UserWarning")
    def test_flex_agrees_with_sdpa(self, routed_case: Case) -> None:
        """Compiled for one case of transformers' kernel and one of ours, since it takes seconds."""
        torch._dynamo.reset()
        is_compiled = routed_case.name in ("simplified-sas_p-alibi", "sparse-longformer")
        refused = ("sparse-bigbird", "etc-bigbird", "bp-masked", "bp-positions")
        is_refused = routed_case.name in refused or routed_case.name.startswith(("reformer", "routing"))
        # which draws its blocks, or wraps around, by the length of each row; or chooses keys by content
        refusal = pytest.raises(
            hea.UnsupportedBackendError, match="drawn anew for the length|not chosen ones|rounds of an order"
        )
        stance = torch.compiler.set_stance("default" if is_compiled else "force_eager")
        with refusal if is_refused else nullcontext(), stance:
            self.compare_kernels(routed_case, "flex_attention")

    def compare_kernels(self, case: Case, kernel: str) -> None:
        model = case.model()
        ids = random_ids(2, 10)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        with torch.no_grad():
            expected = model(ids, attention_mask=mask, use_cache=False).logits
            model.set_attn_implementation(kernel)
            actual = model(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=TOLERANCE, rtol=TOLERANCE)

    # what is trained on here is the states alone
    @pytest.mark.filterwarnings("ignore:The loss that is trained does not contain auxiliary_loss")
    def test_gradient_checkpointing_changes_no_gradient(self, case: Case, auto_class: str) -> None:
        gradients = []
        for checkpointing in (False, True):
            model = case.model(auto_class).train()
            if checkpointing:
                checkpoint_activations(model)
            scalar(model(**head_inputs(auto_class))).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for plain, checkpointed in zip(*gradients, strict=True):
            # without a cache, which checkpointing switches off, sums may be rounded otherwise
            atol = 1e-6 * max(1.0, float(plain.abs().max()))
            torch.testing.assert_close(checkpointed, plain, atol=atol, rtol=1e-5)

    def test_serving_engines_are_served_right_or_refused(self, routed_case: Case) -> None:
        config = routed_case.config()
        if not getattr(config, "is_centered", True):
            pytest.skip("plain softmax attention is what those engines compute")
        for engine in ("vllm", "sglang", "paged|eager"):
            model = routed_case.model()
            model.config._attn_implementation = engine
            with pytest.raises(hea.UnsupportedBackendError, match="running mean|attention pattern|softmax attention"):
                model(random_ids(1, 4))
