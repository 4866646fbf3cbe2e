"""What every family satisfies when it is saved and loaded; a part of `FamilyContract`."""

from pathlib import Path

import pytest
import torch
import transformers
from models_cases import TINY, Case, first_tensor, head_inputs, random_ids
from word_tokenizer import word_tokenizer

from hf_efficient_attn.models.spans.module import span_modules


class SavingContract:
    """The promises about folders: weights, buffers, precision, offloaded layers, pipelines."""

    def test_save_and_load_is_bit_equal(self, case: Case, auto_class: str, tmp_path: Path) -> None:
        self.check_save_and_load(case, auto_class, tmp_path, torch.float32)

    def test_save_and_load_in_low_precision_is_bit_equal(self, routed_case: Case, tmp_path: Path) -> None:
        """What is kept in float32 is of backbones, not of heads, which are thorough."""
        self.check_save_and_load(routed_case, routed_case.main_head, tmp_path, torch.bfloat16)

    @pytest.mark.thorough
    def test_save_and_load_of_every_head_in_low_precision_is_bit_equal(
        self, case: Case, auto_class: str, tmp_path: Path
    ) -> None:
        self.check_save_and_load(case, auto_class, tmp_path, torch.bfloat16)

    def check_save_and_load(self, case: Case, auto_class: str, tmp_path: Path, dtype: torch.dtype) -> None:
        model = case.model(auto_class).to(dtype)
        model.save_pretrained(tmp_path)
        assert not list(tmp_path.glob("*.bin"))
        again = getattr(transformers, auto_class).from_pretrained(tmp_path, dtype=dtype).eval()
        state, loaded = model.state_dict(), again.state_dict()
        assert state.keys() == loaded.keys()
        for key in state:
            assert torch.equal(state[key].float(), loaded[key].float()), key
        inputs = {key: x for key, x in head_inputs(auto_class).items() if key in ("input_ids", "attention_mask")}
        with torch.no_grad():
            # equal weights at another memory alignment may take another kernel: equal to rounding, not to the bit
            tolerance = 1e-6 if dtype == torch.float32 else 1e-1
            expected, actual = first_tensor(model(**inputs)), first_tensor(again(**inputs))
            torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)

    def test_buffers_survive_loading(self, case: Case, tmp_path: Path) -> None:
        model = case.model()
        model.save_pretrained(tmp_path)
        again = getattr(transformers, case.main_head).from_pretrained(tmp_path)
        loaded = dict(again.named_buffers())
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, loaded[name]), name

    def test_pipeline_works_from_the_folder(self, routed_case: Case, tmp_path: Path) -> None:
        word_tokenizer(TINY["vocab_size"]).save_pretrained(tmp_path)
        routed_case.model().save_pretrained(tmp_path)
        task = "text-generation" if routed_case.is_causal else "fill-mask"
        pipe = transformers.pipeline(task, model=str(tmp_path), device="cpu")
        assert pipe("w1 w2 [MASK] w3", **({"max_new_tokens": 4} if routed_case.is_causal else {}))

    def test_offloaded_layers_compute_the_same(self, routed_case: Case, tmp_path: Path) -> None:
        model = routed_case.model()
        model.save_pretrained(tmp_path / "model")
        homes = {name: "cpu" for name, _ in model.named_children()}
        homes |= {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
        homes |= {f"model.layers.{index}": "disk" if index else "cpu" for index in range(len(model.model.layers))}
        homes.pop("model")
        auto_class = getattr(transformers, routed_case.main_head)
        again = auto_class.from_pretrained(tmp_path / "model", device_map=homes, offload_folder=tmp_path / "disk")
        ids = random_ids(2, 9)
        with torch.no_grad():
            torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=1e-6, rtol=1e-6)

    def test_unknown_keywords_are_refused(self, routed_case: Case, tmp_path: Path) -> None:
        """As by the models of transformers: one that is misspelt would change nothing."""
        routed_case.model().save_pretrained(tmp_path)
        with pytest.raises(TypeError, match="attn_implementaton"):
            getattr(transformers, routed_case.main_head).from_pretrained(tmp_path, attn_implementaton="eager")

    def test_loaded_in_one_precision(self, routed_case: Case, tmp_path: Path) -> None:
        """Sharding (FSDP2) wants parameters of one dtype. Spans, which bfloat16 would move by many tokens, are not."""
        routed_case.model().save_pretrained(tmp_path)
        auto_class = getattr(transformers, routed_case.main_head)
        again = auto_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
        spans = {parameter for module in span_modules(again) for parameter in module.parameters()}
        assert {parameter.dtype for parameter in again.parameters() if parameter not in spans} == {torch.bfloat16}
        assert all(parameter.dtype == torch.float32 for parameter in spans)
