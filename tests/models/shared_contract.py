"""What every family satisfies, encoder-decoders included, of heads, inputs, dropout and training.

`test_shared_contract.py` runs it.
"""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models_cases import checkpoint_activations, first_tensor, switch_off_dropout
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.hub.stub import FILE
from hf_efficient_attn.models.spans.module import span_modules


class SharedContract:
    """One method a promise; `case` and `auto_class` are parametrised by `test_shared_contract.py`."""

    def test_without_dropout_training_computes_what_evaluation_does(self, case: Any, auto_class: str) -> None:
        """Dropout stands where the ecosystem looks for it: in `nn.Dropout`, attention weights included."""
        fields = {name: 0.5 for name in case.config().to_dict() if name.endswith("_dropout")}
        places = ("activation", "attention", "classifier", "embedding", "hidden")
        assert {f"{place}_dropout" for place in places} <= fields.keys()
        model, inputs = case.model(auto_class, **fields), case.inputs(auto_class)
        with torch.no_grad():
            expected = first_tensor(model(**inputs))
            model.train()
            assert not torch.equal(first_tensor(model(**inputs)), expected)
            switch_off_dropout(model)
            torch.testing.assert_close(first_tensor(model(**inputs)), expected, atol=1e-6, rtol=1e-5)

    def test_attention_dropout_acts_in_training_only(self, case: Any) -> None:
        fields = {name: 0.0 for name in case.config().to_dict() if name.endswith("_dropout")}
        model, inputs = case.model(**{**fields, "attention_dropout": 0.5}), case.inputs()
        with torch.no_grad():
            expected = first_tensor(model(**inputs))
            assert torch.equal(first_tensor(model(**inputs)), expected)
            assert not torch.allclose(first_tensor(model.train()(**inputs)), expected, atol=1e-3)

    def test_no_examples_and_no_tokens_are_refused(self, case: Any, auto_class: str = "") -> None:
        """Of the main head, where no other is asked for: the backbone refuses them."""
        auto_class = auto_class or case.main_head
        model, inputs = case.model(auto_class), without_labels(case.inputs(auto_class))
        for nothing in (lambda each: each[:0], lambda each: each[..., :0]):
            for left_out in ((), ("attention_mask",)):
                empty = {name: nothing(each) for name, each in inputs.items() if name not in left_out}
                with pytest.raises(hea.InputError, match="There are no tokens"):
                    model(**empty)

    # torch's tracer warns of itself, and of every number that it takes for a constant
    @pytest.mark.filterwarnings("ignore")
    def test_a_traced_model_takes_another_mask_or_is_refused(self, case: Any) -> None:
        model, inputs = case.model().requires_grad_(False), without_labels(case.inputs())
        mask = inputs.pop("attention_mask")

        def run(attention_mask: Tensor) -> Tensor:
            return first_tensor(model(**inputs, attention_mask=attention_mask, use_cache=False))

        try:
            traced = torch.jit.trace(run, (torch.ones_like(mask),), check_trace=False)
        except hea.UnsupportedBackendError:
            return
        for other in (mask, mask.flip(1)):
            torch.testing.assert_close(traced(other), run(other))

    def test_masks_of_another_type_or_shape_or_with_other_values_are_refused(self, case: Any) -> None:
        model, inputs = case.model(), without_labels(case.inputs())
        if "decoder_input_ids" in inputs:
            inputs["decoder_attention_mask"] = torch.ones_like(inputs["decoder_input_ids"])
        for name in [name for name in inputs if name.endswith("attention_mask")]:
            mask = inputs[name]
            types = (mask.tolist(), mask.numpy(), "ones", 1)
            for wrong in (*types, mask[0], mask[:, None], mask[:2], mask[:, 1:], mask.repeat(1, 2)):
                with pytest.raises(hea.InputError, match="attention_mask"):
                    model(**{**inputs, name: wrong})
            for value in (2, -1, 0.5, float("-inf"), float("nan")):
                wrong = mask.to(torch.tensor(value).dtype, copy=True)
                wrong[1, 0] = value
                with pytest.raises(hea.InputError, match=f"attention_mask holds {value}"):
                    model(**{**inputs, name: wrong})

    def test_arguments_are_read_or_refused_and_those_of_libraries_ignored(self, case: Any) -> None:
        model, inputs = case.model(), without_labels(case.inputs())
        ids = inputs["input_ids"]
        with torch.no_grad():
            expected = first_tensor(model(**inputs))
            for_others = {"num_items_in_batch": 7, "output_router_logits": False, "mm_token_type_ids": ids}
            assert torch.equal(first_tensor(model(**inputs, **for_others)), expected)
        half = torch.zeros_like(ids)
        half[..., ids.shape[-1] // 2 :] = 1
        unread = {"head_mask": torch.ones(2, 4), "atention_mask": torch.ones_like(ids), "position_id": half}
        for name in ("token_type_ids", "global_attention_mask"):
            if name not in getattr(type(model), "extra_inputs", ()):
                unread[name] = half
        for name, value in unread.items():
            with pytest.raises(hea.InputError, match=name):
                model(**inputs, **{name: value})
        if "token_type_ids" in unread:
            with torch.no_grad():
                assert torch.equal(first_tensor(model(**inputs, token_type_ids=torch.zeros_like(ids))), expected)
        elif "type_vocab_size" in case.config().to_dict() and not case.config().type_vocab_size:
            with pytest.raises(hea.InputError, match="token_type_ids"):
                model(**inputs, token_type_ids=half)

    def test_any_dtype_and_layout_of_inputs_gives_the_same(self, case: Any) -> None:
        """Of one head: the backbone reads them."""
        model, inputs = case.model(), without_labels(case.inputs())
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        forms = [{"input_ids": form} for form in (ids.int(), non_contiguous(ids))]
        dtypes = (torch.bool, torch.int32, torch.uint8, torch.float32, torch.bfloat16)
        forms += [{"attention_mask": form} for form in (*(mask.to(dtype) for dtype in dtypes), non_contiguous(mask))]
        with torch.no_grad():
            expected = first_tensor(model(**inputs))
            for form in forms:
                torch.testing.assert_close(first_tensor(model(**{**inputs, **form})), expected, atol=1e-6, rtol=1e-5)

    def test_any_layout_of_embeddings_gives_the_same(self, case: Any) -> None:
        # embeddings do not say which tokens are global
        by_token = "token_ids" in (getattr(case.config(), "global_tokens", None) or {})
        model = case.model("AutoModel", **({"global_tokens": None} if by_token else {}))
        inputs = {**without_labels(case.inputs("AutoModel")), "input_ids": None}
        embedded = model.get_input_embeddings()(torch.full((3, 12), 5)).detach()
        # as a prompt that is learned: one vector for all examples
        forms = [embedded[:1].clone().expand(3, -1, -1), non_contiguous(embedded), embedded.mT.contiguous().mT]
        with torch.no_grad():
            expected = first_tensor(model(**inputs, inputs_embeds=embedded))
            for form in forms:
                assert not form.is_contiguous()
                actual = first_tensor(model(**inputs, inputs_embeds=form))
                torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)

    # its loss is that of the states
    @pytest.mark.filterwarnings("ignore:The training loss does not include auxiliary_loss")
    def test_a_users_own_model_around_the_backbone(self, case: Any, is_shared: bool, tmp_path: Path) -> None:
        """Whatever implementation transformers, which asks the outer class, gives to the config of both."""
        backbone, inputs = case.model("AutoModel"), case.inputs("AutoModel")
        outer_class: Any = around(case.config_class) if is_shared else Around
        outer = outer_class(case.config() if is_shared else AroundConfig(inner=case.config())).eval()
        outer.backbone.load_state_dict(backbone.state_dict())
        # the default of the backbone itself, not the slow one that transformers takes for a class of which it is unsure
        assert outer.backbone.config._attn_implementation == backbone.config._attn_implementation

        def check(model: Any, tolerance: float = 1e-4) -> None:
            torch.testing.assert_close(model(**inputs)[1:], expected, atol=tolerance, rtol=tolerance)

        with torch.no_grad():
            # the first text has padding, whose states are nothing
            expected = 2 * first_tensor(backbone(**inputs))[1:]
            check(outer, 1e-6)
            for name in ("sdpa", "eager", "efficient"):
                outer.set_attn_implementation(name)
                check(outer)
        outer.save_pretrained(tmp_path)
        for options in ({}, {"attn_implementation": "eager"}):
            with torch.no_grad():
                check(outer_class.from_pretrained(tmp_path, **options).eval())
        checkpoint_activations(outer.train())
        outer(**inputs)[1:].square().sum().backward()
        assert all(torch.isfinite(each.grad).all() for each in outer.parameters() if each.grad is not None)
        assert outer.factor.grad is not None

    def test_auto_classes_know_every_head(self, case: Any) -> None:
        assert isinstance(transformers.AutoConfig.for_model(case.config_class.model_type), case.config_class)
        for name, model_class in case.heads.items():
            auto_class = getattr(transformers, name)
            assert type(auto_class.from_config(case.config())) is model_class
            # by which Trainer, lm-eval and others decide what a model is
            assert auto_class._model_mapping._model_mapping[case.config_class.model_type] == model_class.__name__

    def test_the_config_says_how_wide_the_last_hidden_state_is(self, case: Any) -> None:
        """As sentence-transformers and EncoderDecoderModel ask for it."""
        model = case.model("AutoModel")
        assert first_tensor(model(**case.inputs("AutoModel"))).shape[-1] == model.config.hidden_size

    def test_stub_beside_a_saved_config_has_every_class(self, case: Any, tmp_path: Path) -> None:
        """So that programs which do not import the package can load it (`tests/sharing/test_stub_processes.py`)."""
        case.config().save_pretrained(tmp_path)
        names = runpy.run_path(str(tmp_path / FILE))
        auto_map = transformers.AutoConfig.from_pretrained(tmp_path).auto_map
        for name, cls in {"AutoConfig": case.config_class, **case.heads}.items():
            module, _, found = auto_map[name].partition(".")
            assert names[found] is cls
            assert f"{module}.py" == FILE

    def test_model_card_explains_and_loads_it(self, case: Any) -> None:
        """Over HTTP: `tests/sharing/test_repositories.py`."""
        model = case.model()
        card = hea.hub.model_card(model, "you/model")
        assert f'{case.main_head}.from_pretrained("you/model")' in card.text
        try:
            hea.explain(model, 64)
            expected = ["| layers |", "■"]
        except hea.EfficientAttentionError as refusal:
            expected = [str(refusal)]
        assert all(part in card.text for part in expected)

    def test_built_on_meta(self, case: Any) -> None:
        with torch.device("meta"):
            for model_class in case.heads.values():
                assert all(parameter.is_meta for parameter in model_class(case.config()).parameters())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.thorough)])
    def test_low_precision_is_finite_with_padding_rows(self, case: Any, dtype: torch.dtype) -> None:
        model = case.model().to(dtype).train()
        inputs = case.inputs()
        inputs["attention_mask"][1] = 0
        inputs["labels"][1] = -100
        output = model(**inputs)
        output.loss.backward()
        assert torch.isfinite(output.logits).all()
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())

    def test_loaded_in_one_precision(self, case: Any, tmp_path: Path) -> None:
        """Sharding (FSDP2) wants parameters of one dtype. Spans, which bfloat16 would move by many tokens, are not."""
        case.model().save_pretrained(tmp_path)
        again = getattr(transformers, case.main_head).from_pretrained(tmp_path, dtype=torch.bfloat16)
        spans = {parameter for module in span_modules(again) for parameter in module.parameters()}
        assert {parameter.dtype for parameter in again.parameters() if parameter not in spans} == {torch.bfloat16}
        assert all(parameter.dtype == torch.float32 for parameter in spans)

    @pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.thorough)])
    def test_gradient_checkpointing_changes_no_gradient(self, case: Any, reentrant: bool) -> None:
        gradients = []
        for checkpointing in (False, True):
            model = case.model().train()
            switch_off_dropout(model)
            if checkpointing:
                checkpoint_activations(model, {"use_reentrant": reentrant})
            if checkpointing and reentrant:
                model.enable_input_require_grads()
            try:
                model(**case.inputs()).loss.backward()
            except hea.UnsupportedBackendError:
                # of layers that hand tensors on beside their states, which the reentrant kind would detach
                assert checkpointing
                assert reentrant
                return
            gradients.append([parameter.grad for parameter in model.parameters()])
        for plain, checkpointed in zip(*gradients, strict=True):
            # without a cache, which checkpointing switches off, sums may be rounded otherwise
            atol = 1e-6 * max(1.0, float(plain.abs().max()))
            torch.testing.assert_close(checkpointed, plain, atol=atol, rtol=1e-5)

    def test_serving_engines_are_served_right_or_refused(self, case: Any) -> None:
        if not getattr(case.config(), "is_centered", True):
            pytest.skip("plain softmax attention is what those engines compute")
        # flash attention knows no patterns, which simplified blocks do not have
        others = () if case.name.startswith("simplified") else ("flash_attention_2",)
        for engine in ("vllm", "sglang", "paged|eager", *others):
            model = case.model()
            model.config._attn_implementation = engine
            with pytest.raises(hea.UnsupportedBackendError, match="running mean|attention pattern|softmax attention"):
                model(**without_labels(case.inputs()))

    def test_trains_and_the_loss_falls(self, case: Any) -> None:
        torch.manual_seed(0)
        model = case.heads[case.main_head](case.config()).train()
        inputs = case.inputs()
        optimizer = torch.optim.AdamW(hea.optimizer_groups(model, 0.1), lr=1e-2)
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.5


class AroundConfig(transformers.PreTrainedConfig):
    """A user's config that holds one of ours."""

    model_type = "around"
    sub_configs = {"inner": transformers.AutoConfig}
    inner: Any = None

    def __post_init__(self, **fields: Any) -> None:
        if isinstance(self.inner, dict):
            self.inner = transformers.AutoConfig.for_model(**self.inner)
        super().__post_init__(**fields)


class Around(transformers.PreTrainedModel):
    """A user's model: a backbone of ours, and a head of its own."""

    config_class = AroundConfig
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.backbone = transformers.AutoModel.from_config(getattr(config, "inner", config))
        self.factor = torch.nn.Parameter(torch.tensor([2.0]))
        self.post_init()

    def forward(self, **inputs: Any) -> Tensor:
        return self.factor * first_tensor(self.backbone(**inputs))


def around(config_class: Any) -> Any:
    """Return such a model whose config is the backbone's own."""
    return type("AroundSameConfig", (Around,), {"config_class": config_class, "__module__": __name__})


def without_labels(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return inputs that ask for no loss; labels of a target become what its decoder reads."""
    kept = {name: each for name, each in inputs.items() if not name.endswith(("labels", "_positions"))}
    if "labels" in inputs and inputs["labels"].shape[-1] == 6:
        kept["decoder_input_ids"] = inputs["labels"].clamp(min=0)
    return kept


def non_contiguous(states: Tensor) -> Tensor:
    """Return the same numbers, every second of a larger tensor."""
    return torch.stack((states, states), -1)[..., 0]
