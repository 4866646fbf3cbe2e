"""The adapters of PEFT on every family."""

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from families import BY_NAME, CASES, FAMILIES, OURS
from family import Family
from models_cases import TINY, Case, case_param, first_tensor, random_ids, trainer_arguments

import hf_efficient_attn as hea

# peft asks models for an attribute that transformers has renamed, and drops the positions that `generate` gives it
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:Position ids are not:UserWarning"
)


class Numbered:
    """A case whose inputs have numbers, in pieces of unequal lengths, beside the tokens that they number."""

    def __init__(self, name: str, numbered: dict[str, str]) -> None:
        self.case, self.numbered = BY_NAME[name], numbered

    def __getattr__(self, name: str) -> Any:
        return getattr(self.case, name)

    def inputs(self, auto_class: str) -> dict[str, torch.Tensor]:
        """Return the inputs of the case, and numbers that differ between examples."""
        found = self.case.inputs(auto_class)
        for name, tokens in self.numbered.items():
            rows, count = found[tokens].shape
            found[name] = (torch.arange(count)[None] + torch.arange(rows)[:, None]) // 3
        return found


NUMBERED = {
    "etc": Numbered("etc-base", {"long_contexts": "input_ids"}),
    "bp": Numbered("bp-seq2seq", {"sentence_ids": "input_ids", "decoder_sentence_ids": "labels"}),
}
every_case = pytest.mark.parametrize("case", [case_param(case, is_thorough=not case.shows_a_route) for case in CASES])
# the kinds of heads of each family, which are the same on all of its cases
FIRST = {case.config_class: case for case in reversed(CASES)}
CLASSIFIERS = [
    case_param(case, kind, name=f"{case.name}-{kind}", is_thorough=case not in FIRST.values())
    for case in CASES
    for kind in ("linear", "dense")
    if "AutoModelForSequenceClassification" in case.heads
    if kind == "linear" or hasattr(case.config(), "classifier_head")
]
MAPS = {
    "lora": partial(peft.LoraConfig, target_modules="all-linear", r=2),
    "ia3": partial(peft.IA3Config, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}
VIRTUAL_TOKENS = {
    "prompt": partial(peft.PromptTuningConfig, num_virtual_tokens=3),
    "prefix": partial(peft.PrefixTuningConfig, num_virtual_tokens=3),
}
KINDS = {
    **MAPS,
    **VIRTUAL_TOKENS,
    "dora": partial(MAPS["lora"], use_dora=True),
    "p_tuning": partial(peft.PromptEncoderConfig, num_virtual_tokens=3, encoder_hidden_size=8),
}


def adapted(case: Case, adapter: Any) -> Any:
    """Return a language model, or a backbone that reads both sides, with an adapter."""
    model = case.model(case.main_head if case.is_causal else "AutoModel")
    return peft.get_peft_model(model, adapter(task_type="CAUSAL_LM" if case.is_causal else "FEATURE_EXTRACTION"))


def learn(model: Any, ids: torch.Tensor) -> None:
    """Check that a step of training moves something, and nothing to infinity."""
    first_tensor(model(input_ids=ids, attention_mask=torch.ones_like(ids))).square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert any(gradient.abs().max() > 0 for gradient in gradients)


@every_case
def test_adapted_maps_change_nothing_and_learn(case: Case) -> None:
    ids = random_ids(2, 9)
    for adapter in MAPS.values():
        model = adapted(case, adapter)
        with torch.no_grad(), model.disable_adapter():
            expected = first_tensor(model(input_ids=ids))
        torch.testing.assert_close(first_tensor(model(input_ids=ids)), expected)
        learn(model, ids)


@pytest.mark.parametrize(("case", "classifier_head"), CLASSIFIERS)
def test_a_new_classifier_is_trained_and_comes_back_with_its_adapter(
    case: Case, classifier_head: str, tmp_path: Path
) -> None:
    """PEFT finds it by its name: its weights are in no checkpoint of the model below it."""
    head = "AutoModelForSequenceClassification"
    fields = {"classifier_head": classifier_head} if hasattr(case.config(), "classifier_head") else {}
    model = peft.get_peft_model(case.model(head, **fields), MAPS["lora"](task_type="SEQ_CLS", init_lora_weights=False))
    assert any(".lora_" in name for name, _ in model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "classifier" in name:
                assert parameter.requires_grad == ("modules_to_save" in name)
                parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    # of other weights in the head alone
    other = case.model(head, seed=1, **fields)
    other.model.load_state_dict(case.model(head, **fields).model.state_dict())
    loaded, ids = peft.PeftModel.from_pretrained(other, tmp_path).eval(), random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


@every_case
@pytest.mark.parametrize("kind", VIRTUAL_TOKENS)
def test_virtual_tokens_learn_and_generate(case: Case, kind: str) -> None:
    model, ids = adapted(case, VIRTUAL_TOKENS[kind]), random_ids(2, 9)
    keeps_no_keys = hasattr(model.config, "layers_with") and bool(model.config.layers_with("linear"))
    is_refused = kind == "prefix" and (keeps_no_keys or getattr(model.config, "global_projections", False))
    refusing = [family for family in OURS if case in family.cases and kind in family.refuses]
    if is_refused or any(case.name not in family.accepts.get(kind, ()) for family in refusing):
        with pytest.raises(hea.UnsupportedBackendError, match="Prefix tuning cannot"):
            model(input_ids=ids)
        return
    learn(model, ids)
    if case.is_causal:
        options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
        text = model.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        with torch.no_grad():
            logits = model(input_ids=text[:, :-1]).logits[:, -3:]
        logits[..., TINY["eos_token_id"]] = -torch.inf
        assert torch.equal(text[:, -3:], logits.argmax(-1))


@pytest.mark.thorough
# as which PEFT gives prefixes to models of transformers 5.24
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_trained_adapters_come_back_and_are_merged(family: Family, kind: str, tmp_path: Path) -> None:
    """Of encoder-decoders and sparsified models, too."""
    case, head = (family.reader, "AutoModel") if family.writer is None else (family.writer, family.writer.main_head)
    tasks = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM"}
    adapter = KINDS[kind](task_type=tasks.get(head, "FEATURE_EXTRACTION"))
    model, ids = peft.get_peft_model(case.model(head), adapter).eval(), random_ids(2, 9)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family.is_encoder_decoder:
        inputs["decoder_input_ids"] = random_ids(2, 5)
    if kind in family.refuses:
        with pytest.raises(hea.UnsupportedBackendError, match=family.refuses[kind]):
            model(**inputs)
        return
    first_tensor(model(**inputs)).square().mean().backward()
    trained = [each for each in model.parameters() if each.requires_grad and each.grad is not None]
    assert all(each.grad.isfinite().all() for each in trained)
    assert any(each.grad.any() for each in trained)
    with torch.no_grad():
        for each in trained:
            each.add_(torch.randn_like(each) * 0.1)
        expected = first_tensor(model(**inputs))
        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(case.model(head), tmp_path).eval()
        torch.testing.assert_close(first_tensor(loaded(**inputs)), expected, atol=1e-5, rtol=1e-5)
        if kind in ("lora", "dora", "ia3"):
            merged = loaded.merge_and_unload()
            torch.testing.assert_close(first_tensor(merged(**inputs)), expected, atol=1e-4, rtol=1e-4)
            assert not any("lora" in name or "ia3" in name for name in merged.state_dict())


@pytest.mark.parametrize("name", NUMBERED)
def test_numbers_of_contexts_and_sentences_reach_an_adapted_model(name: str, tmp_path: Path) -> None:
    """Through Trainer, which asks the model below the adapter what it reads; saved and loaded, it computes the same."""
    case = NUMBERED[name]
    model = peft.get_peft_model(case.model(case.main_head), MAPS["lora"](init_lora_weights=False))
    inputs, seen = case.inputs(case.main_head), []
    model.base_model.model.register_forward_pre_hook(lambda _, args, given: seen.append(given), with_kwargs=True)
    args = trainer_arguments(tmp_path, max_steps=2)
    items = [{each: row[index] for each, row in inputs.items()} for index in range(len(inputs["input_ids"]))]
    transformers.Trainer(model, args, train_dataset=items).train()
    assert len(seen) == 2
    assert all(given.keys() >= case.numbered.keys() for given in seen)
    without = {each: inputs[each] for each in inputs.keys() - case.numbered.keys()}
    with torch.no_grad():
        found = model.eval()(**inputs).logits
        assert not torch.allclose(found, model(**without).logits)
        model.save_pretrained(tmp_path / "adapter")
        loaded = peft.PeftModel.from_pretrained(case.model(case.main_head), tmp_path / "adapter").eval()
        assert torch.equal(loaded(**inputs).logits, found)
        torch.testing.assert_close(loaded.merge_and_unload()(**inputs).logits, found, atol=1e-4, rtol=1e-4)


def test_dora_without_the_zero_query_maps_is_finite() -> None:
    """DoRA divides by the norm of a map's rows, and the query maps of untrained shaped attention are zero."""
    model: Any = hea.SimplifiedTransformerForCausalLM(hea.SimplifiedTransformerConfig(**TINY, block="sas_p"))
    adapter = peft.LoraConfig(target_modules="all-linear", exclude_modules=r".*q_proj", r=2, use_dora=True)
    learn(peft.get_peft_model(model, adapter), random_ids(2, 9))


@pytest.mark.parametrize("config_class", [hea.SimplifiedTransformerConfig, hea.SparseTransformerConfig])
def test_key_heads_are_counted_in_a_model_and_in_no_config_before(config_class: Any, tmp_path: Path) -> None:
    config = config_class(**TINY, is_causal=True)
    assert config.num_key_value_heads is None
    config.save_pretrained(tmp_path / "uncounted")
    config.update_from_string("num_attention_heads=8")
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.config.num_key_value_heads == 8
    model.save_pretrained(tmp_path / "counted")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "counted").num_key_value_heads == 8
    assert transformers.AutoConfig.from_pretrained(tmp_path / "uncounted").num_key_value_heads is None


@pytest.mark.parametrize("name", ["span-modern", "span-dynamic", "simplified-sas-span"])
def test_virtual_tokens_before_padding_are_cached_by_spans(name: str) -> None:
    """Padding on the left then stands behind the virtual tokens."""
    case = BY_NAME[name]
    model, ids = adapted(case, VIRTUAL_TOKENS["prompt"]).eval(), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    cached = model.generate(input_ids=ids, **options)
    assert torch.equal(cached, model.generate(input_ids=ids, use_cache=False, **options))
