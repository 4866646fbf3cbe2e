"""What every family of one stack satisfies: DESIGN.md section 6. `test_contract.py` runs it for every case."""

import inspect
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from models.shared_checks import check_compiled_training, check_exported, check_save_and_load
from models_cases import TINY, TOLERANCE, Case, first_tensor, head_inputs, random_ids
from transformers.modeling_layers import GradientCheckpointingLayer
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea


class SavingContract:
    """The promises about folders: weights, buffers, precision, offloaded layers, pipelines."""

    @pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
    def test_save_and_load_is_bit_equal(
        self, routed_case: Case, auto_class: str, tmp_path: Path, dtype: torch.dtype
    ) -> None:
        """`precision_contract.py` loads every case in bfloat16, and compares all parameters and buffers."""
        inputs = {key: x for key, x in head_inputs(auto_class).items() if key in ("input_ids", "attention_mask")}
        check_save_and_load(routed_case.model(auto_class).to(dtype), auto_class, inputs, tmp_path)

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


# what no mask and a mask of ones come to is the same to every kernel: thorough with others than padding by one
KERNELS_AND_MASKS = [
    pytest.param(kernel, mask, marks=[pytest.mark.thorough] * ((kernel, mask) != ("sdpa", "padded")))
    for kernel in ("sdpa", "eager")
    for mask in ("none", "ones", "padded")
]


def matrices(mask: torch.Tensor, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a padding mask [B, T] comes to as a matrix [B, 1, T, T], of bools, and to be added to scores."""
    batch_size, tokens = mask.shape
    allowed = mask[:, None, None].bool().expand(batch_size, 1, tokens, tokens)
    if is_causal:
        allowed = allowed & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return allowed, torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


class MasksContract:
    """The promises about which tokens a token reads."""

    def test_padding_and_batch_mates_change_nothing(self, case: Case, auto_class: str) -> None:
        if auto_class.endswith("MultipleChoice"):
            pytest.skip("its inputs are three-dimensional; it pools what SequenceClassification pools")
        model = case.model(auto_class)
        ids, mate = random_ids(1, 7), random_ids(1, 12, seed=3)
        ids[:, 2] = mate[:, 2] = TINY["eos_token_id"]  # ends the question, where there is one
        rows = torch.cat([*(torch.nn.functional.pad(ids, sides) for sides in ((5, 0), (0, 5))), mate])
        with torch.no_grad():
            alone = first_tensor(model(ids))
            together = first_tensor(model(rows, attention_mask=(rows > 0).long()))
        for text, own in zip(together.split(1), (slice(5, None), slice(7)), strict=False):
            found = text if auto_class == "AutoModelForSequenceClassification" else text[:, own]
            torch.testing.assert_close(found, alone, atol=TOLERANCE, rtol=TOLERANCE)

    def test_rounding_of_projections_decides_nothing(self, case: Case) -> None:
        """States of equal tokens differ by rounding, which shapes and processors decide on: it must choose no keys."""
        # with this seed, no states of the upper layer are so nearly equal that rounding may decide between them
        model, ids = case.model(seed=3), 3 + random_ids(2, 24) % 2
        noise = torch.Generator().manual_seed(0)

        def rounded(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
            return output * (1 + 2e-7 * torch.randn(output.shape, generator=noise))

        with torch.no_grad():
            expected = model(ids).logits
            for module in model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_hook(rounded)
            torch.testing.assert_close(model(ids).logits, expected, atol=TOLERANCE, rtol=TOLERANCE)

    def test_what_stands_beside_a_text_changes_nothing(self, case: Case) -> None:
        """Other rows, padding on both sides and, in causal models, what follows: for several texts and choices."""
        for changes in ({}, *case.choices):
            model = case.model("AutoModel", **changes).double()
            for tokens in (5, 9, 12):
                # each token once: of equal ones, rounding may decide which comes first
                words = torch.randperm(58, generator=torch.Generator().manual_seed(tokens)) + 3
                ids, mates = words[None, :tokens], random_ids(2, 18, seed=tokens)
                padded = torch.nn.functional.pad(ids, (2, 16 - tokens))
                mask = torch.nn.functional.pad(torch.ones_like(ids), (2, 16 - tokens))
                with torch.no_grad():
                    alone = model(ids).last_hidden_state
                    inputs = torch.cat([padded, mates]), torch.cat([mask, torch.ones_like(mates)])
                    found = [model(inputs[0], attention_mask=inputs[1]).last_hidden_state[:1, 2 : tokens + 2]]
                    if case.is_causal:
                        found.append(model(words[None, :18]).last_hidden_state[:, :tokens])
                for other in found:
                    torch.testing.assert_close(
                        other, alone, atol=1e-9, rtol=1e-9, msg=partial("{}: {}".format, changes)
                    )

    @pytest.mark.parametrize(("kernel", "mask"), KERNELS_AND_MASKS)
    def test_packed_documents_do_not_see_each_other(self, case: Case, kernel: str, mask: str) -> None:
        """Called as a training loop calls it: nothing said about the cache."""
        model = case.model()
        model.set_attn_implementation(kernel)
        documents = [random_ids(1, length, seed=length) for length in (5, 1, 9)]
        positions = torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None]
        ids = torch.cat(documents, 1)
        inputs = {}
        if mask != "none":
            inputs["attention_mask"] = torch.ones_like(ids)
        if mask == "padded":
            ids = torch.cat([torch.zeros(1, 2, dtype=torch.long), ids, torch.zeros(1, 3, dtype=torch.long)], 1)
            positions = torch.nn.functional.pad(positions, (2, 3), value=1)
            inputs["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (2, 3))
        with torch.no_grad():
            packed = model(ids, position_ids=positions, **inputs).logits
            alone = torch.cat([model(document).logits for document in documents], 1)
        packed = packed[:, 2:-3] if mask == "padded" else packed
        torch.testing.assert_close(packed, alone, atol=TOLERANCE, rtol=TOLERANCE)

    def test_four_dimensional_mask_equals_padding_mask(self, case: Case) -> None:
        model = case.model()
        ids = random_ids(2, 9)
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0
        for kernel in ("sdpa", "eager"):
            model.set_attn_implementation(kernel)
            with torch.no_grad():
                by_padding = model(ids, attention_mask=mask, use_cache=False).logits
                for matrix in matrices(mask, case.is_causal):
                    by_matrix = model(ids, attention_mask=matrix, use_cache=False).logits
                    real = mask.bool()
                    torch.testing.assert_close(by_matrix[real], by_padding[real], atol=TOLERANCE, rtol=TOLERANCE)

    def test_heads_find_the_padding_of_a_four_dimensional_mask(self, routed_case: Case) -> None:
        """Embeddings tell no padding, and on the right it moves no position."""
        if "AutoModelForSequenceClassification" not in routed_case.heads:
            pytest.skip("it classifies no texts")
        model = routed_case.model("AutoModelForSequenceClassification")
        embeds = model.get_input_embeddings()(random_ids(2, 9)).detach()
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[0, 6:] = 0
        with torch.no_grad():
            by_padding = model(inputs_embeds=embeds, attention_mask=mask).logits
            for matrix in matrices(mask, routed_case.is_causal):
                by_matrix = model(inputs_embeds=embeds, attention_mask=matrix).logits
                torch.testing.assert_close(by_matrix, by_padding, atol=TOLERANCE, rtol=TOLERANCE)


class CompileContract:
    """The promises about graphs, whole ones and exported ones; `precision_contract.py` has one for all lengths."""

    def test_compiles_without_graph_breaks(self, traced_case: Case) -> None:
        model = traced_case.model(**traced_case.fewest_layers).train()
        check_compiled_training(model, {**head_inputs(traced_case.main_head), "use_cache": False})

    def test_exports_with_any_batch_and_length(self, traced_case: Case, is_masked: bool) -> None:
        model = traced_case.model(**traced_case.fewest_layers)
        model.config.use_cache = False

        def inputs(rows: int, tokens: int) -> dict[str, torch.Tensor]:
            found = head_inputs(traced_case.main_head, rows, tokens)
            return found if is_masked else {"input_ids": found["input_ids"]}

        dims = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("tokens", min=5, max=64)}
        shapes = {name: {dim: dims[dim] for dim in range(given.ndim)} for name, given in inputs(3, 12).items()}
        check_exported(model, inputs, shapes, [(3, 12), (2, 31), (1, 9)])


class FamilyContract(SavingContract, MasksContract, CompileContract):
    """One method a promise; `case` and `auto_class` are parametrised by `test_contract.py`."""

    def test_names_that_parallelism_relies_on(self, routed_case: Case) -> None:
        backbone = routed_case.model("AutoModel")
        assert {"embed_tokens", "layers", "norm"} <= dict(backbone.named_children()).keys()
        assert {type(layer).__name__ for layer in backbone.layers} == set(backbone._no_split_modules)
        assert all(isinstance(layer, GradientCheckpointingLayer) for layer in backbone.layers)
        assert backbone._supports_context_parallel is False
        assert isinstance(routed_case.model()._tied_weights_keys, dict)

    def test_heads_take_inputs_in_the_usual_order(self, routed_case: Case, auto_class: str) -> None:
        """Trainer passes on only the columns a forward names, and people pass the first two by position."""
        parameters = list(inspect.signature(routed_case.heads[auto_class].forward).parameters)
        assert parameters[1:3] == ["input_ids", "attention_mask"]
        assert {"position_ids", "inputs_embeds"} <= set(parameters)

    def test_eager_agrees_with_sdpa(self, routed_case: Case) -> None:
        self.compare_kernels(routed_case, "eager")

    # compiling flex meets deprecations inside torch itself, and in how transformers calls create_block_mask
    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without:UserWarning")
    def test_flex_agrees_with_sdpa(self, routed_case: Case) -> None:
        """Compiled for one case of transformers' kernel, since it takes seconds; ours is, by `test_contract.py`."""
        torch._dynamo.reset()
        is_compiled = routed_case.name == "simplified-sas_p-alibi"
        refused = ("sparse-bigbird", "etc-bigbird", "bp-masked", "bp-positions")
        is_refused = routed_case.name in refused or routed_case.name.startswith(("reformer", "routing"))
        # which draws its blocks, or wraps around, by the length of each row; or chooses keys by content
        refusal = pytest.raises(hea.UnsupportedBackendError, match="depends on the length of each|selected keys only")
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
