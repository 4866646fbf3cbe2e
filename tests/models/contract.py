"""What every family satisfies: DESIGN.md section 6, line by line. `test_contract.py` runs it for every case."""

import inspect
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models_cases import TINY, Case, checkpoint_activations, head_inputs
from transformers.modeling_layers import GradientCheckpointingLayer
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.module import span_modules

TOLERANCE = 1e-5


def random_ids(rows: int, tokens: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(3, TINY["vocab_size"], (rows, tokens), generator=torch.Generator().manual_seed(seed))


def first_tensor(output: Any) -> torch.Tensor:
    """Return the main output of any head."""
    return next(output[name] for name in ("logits", "start_logits", "last_hidden_state") if name in output)


class FamilyContract:
    """One method a promise; `case` and `auto_class` are parametrised by `test_contract.py`."""

    def test_auto_classes_know_every_head(self, case: Case) -> None:
        assert isinstance(transformers.AutoConfig.for_model(case.config_class.model_type), case.config_class)
        for name, model_class in case.heads.items():
            assert type(getattr(transformers, name).from_config(case.config())) is model_class

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_save_and_load_is_bit_equal(self, case: Case, tmp_path: Path, dtype: torch.dtype) -> None:
        for name in case.heads:
            model = case.model(name).to(dtype)
            model.save_pretrained(tmp_path / name)
            assert not list((tmp_path / name).glob("*.bin"))
            again = getattr(transformers, name).from_pretrained(tmp_path / name, dtype=dtype).eval()
            state, loaded = model.state_dict(), again.state_dict()
            assert state.keys() == loaded.keys()
            for key in state:
                assert torch.equal(state[key].float(), loaded[key].float()), key
            inputs = {key: x for key, x in head_inputs(name).items() if key in ("input_ids", "attention_mask")}
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

    def test_built_on_meta(self, case: Case) -> None:
        with torch.device("meta"):
            for model_class in case.heads.values():
                assert all(parameter.is_meta for parameter in model_class(case.config()).parameters())

    def test_names_that_parallelism_relies_on(self, case: Case) -> None:
        backbone = case.model("AutoModel")
        assert {"embed_tokens", "layers", "norm"} <= dict(backbone.named_children()).keys()
        assert {type(layer).__name__ for layer in backbone.layers} == set(backbone._no_split_modules)
        assert all(isinstance(layer, GradientCheckpointingLayer) for layer in backbone.layers)
        assert backbone._supports_context_parallel is False
        assert isinstance(case.model()._tied_weights_keys, dict)

    def test_every_parameter_gets_a_gradient(self, case: Case, auto_class: str) -> None:
        model = case.model(auto_class).train()
        output = model(**head_inputs(auto_class))
        (output["loss"] if "loss" in output else first_tensor(output).sum()).backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_and_batch_mates_change_nothing(self, case: Case, auto_class: str, side: str) -> None:
        if auto_class.endswith("MultipleChoice"):
            pytest.skip("its inputs are three-dimensional; it pools what SequenceClassification pools")
        model = case.model(auto_class)
        ids, mate = random_ids(1, 7), random_ids(1, 12, seed=3)
        ids[:, 2] = mate[:, 2] = TINY["eos_token_id"]  # ends the question, where there is one
        padding = torch.zeros(1, 5, dtype=torch.long)
        order = (lambda a, b: [a, b]) if side == "left" else (lambda a, b: [b, a])
        padded = torch.cat(order(padding, ids), 1)
        mask = torch.cat(order(padding, torch.ones_like(ids)), 1)
        with torch.no_grad():
            alone = first_tensor(model(ids))
            together = first_tensor(
                model(torch.cat([padded, mate]), attention_mask=torch.cat([mask, torch.ones_like(mate)]))
            )[:1]
        if auto_class != "AutoModelForSequenceClassification":
            together = together[:, 5:] if side == "left" else together[:, :7]
        torch.testing.assert_close(together, alone, atol=TOLERANCE, rtol=TOLERANCE)

    def test_heads_take_inputs_in_the_usual_order(self, case: Case, auto_class: str) -> None:
        """Trainer passes on only the columns a forward names, and people pass the first two by position."""
        parameters = list(inspect.signature(case.heads[auto_class].forward).parameters)
        assert parameters[1:3] == ["input_ids", "attention_mask"]
        assert {"position_ids", "inputs_embeds"} <= set(parameters)

    @pytest.mark.parametrize("kernel", ["sdpa", "eager"])
    @pytest.mark.parametrize("mask", ["none", "ones", "padded"])
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

    @pytest.mark.parametrize("kernel", ["sdpa", "eager"])
    def test_four_dimensional_mask_equals_padding_mask(self, case: Case, kernel: str) -> None:
        model = case.model()
        model.set_attn_implementation(kernel)
        ids = random_ids(2, 9)
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0
        allowed = mask[:, None, None].bool().expand(2, 1, 9, 9)
        if case.is_causal:
            allowed = allowed & torch.ones(9, 9, dtype=torch.bool).tril()
        added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        with torch.no_grad():
            by_padding = model(ids, attention_mask=mask, use_cache=False).logits
            for matrix in (allowed, added):
                by_matrix = model(ids, attention_mask=matrix, use_cache=False).logits
                real = mask.bool()
                torch.testing.assert_close(by_matrix[real], by_padding[real], atol=TOLERANCE, rtol=TOLERANCE)

    def test_eager_agrees_with_sdpa(self, case: Case) -> None:
        self.compare_kernels(case, "eager")

    # compiling flex meets deprecations inside torch itself, and in how transformers calls create_block_mask
    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without:UserWarning")
    def test_flex_agrees_with_sdpa(self, case: Case) -> None:
        """Compiled for one case of transformers' kernel and one of ours, since it takes seconds."""
        torch._dynamo.reset()
        is_compiled = case.name in ("simplified-sas_p-alibi", "sparse-longformer")
        # which draws its blocks by the length of each row
        is_refused = case.name == "sparse-bigbird"
        refusal = pytest.raises(hea.UnsupportedBackendError, match="drawn anew for the length")
        stance = torch.compiler.set_stance("default" if is_compiled else "force_eager")
        with refusal if is_refused else nullcontext(), stance:
            self.compare_kernels(case, "flex_attention")

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

    def test_gradient_checkpointing_changes_no_gradient(self, case: Case, auto_class: str) -> None:
        gradients = []
        for checkpointing in (False, True):
            model = case.model(auto_class).train()
            if checkpointing:
                checkpoint_activations(model)
            output = model(**head_inputs(auto_class))
            (output["loss"] if "loss" in output else first_tensor(output).sum()).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        for plain, checkpointed in zip(*gradients, strict=True):
            # without a cache, which checkpointing switches off, sums may be rounded otherwise
            atol = 1e-6 * max(1.0, float(plain.abs().max()))
            torch.testing.assert_close(checkpointed, plain, atol=atol, rtol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision_is_finite_with_padding_rows(self, case: Case, dtype: torch.dtype) -> None:
        model = case.model().to(dtype).train()
        inputs = head_inputs(case.main_head)
        inputs["attention_mask"][1] = 0
        inputs["labels"][1] = -100
        output = model(**inputs)
        output.loss.backward()
        assert torch.isfinite(output.logits).all()
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())

    def test_compiles_without_graph_breaks(self, traced_case: Case) -> None:
        model = traced_case.model(**traced_case.fewest_layers).train()
        inputs = {**head_inputs(traced_case.main_head), "use_cache": False}
        torch._dynamo.reset()
        actual = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).loss
        actual.backward()
        # behind it: a model that has been called before knows its patterns
        expected = model(**inputs).loss
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)

    def test_lengths_do_not_recompile(self, traced_case: Case) -> None:
        """One graph for all lengths."""
        model, graphs = traced_case.model(**traced_case.fewest_layers), []
        torch._dynamo.reset()

        def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(model, backend=count, dynamic=True)
        with torch.no_grad():
            for tokens in (9, 16, 58):
                compiled(input_ids=random_ids(2, tokens), use_cache=False)
        assert len(graphs) == 1

    @pytest.mark.parametrize("is_masked", [True, False], ids=["masked, with labels", "tokens alone"])
    def test_exports_with_any_batch_and_length(self, traced_case: Case, is_masked: bool) -> None:
        model = traced_case.model(**traced_case.fewest_layers)
        model.config.use_cache = False

        def inputs(rows: int, tokens: int) -> dict[str, torch.Tensor]:
            found = head_inputs(traced_case.main_head, rows, tokens)
            return found if is_masked else {"input_ids": found["input_ids"]}

        example = inputs(3, 12)
        dims = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("tokens", min=5, max=64)}
        shapes = {name: {dim: dims[dim] for dim in range(given.ndim)} for name, given in example.items()}
        program = torch.export.export(model, (), example, dynamic_shapes=shapes, strict=False).module()
        for sizes in ((2, 31), (1, 9)):
            actual, expected = program(**inputs(*sizes)), model(**inputs(*sizes))
            torch.testing.assert_close(actual.logits, expected.logits, atol=TOLERANCE, rtol=TOLERANCE)
            torch.testing.assert_close(actual.loss, expected.loss, atol=TOLERANCE, rtol=TOLERANCE)

    def test_pipeline_works_from_the_folder(self, case: Case, tmp_path: Path) -> None:
        word_tokenizer(TINY["vocab_size"]).save_pretrained(tmp_path)
        case.model().save_pretrained(tmp_path)
        task = "text-generation" if case.is_causal else "fill-mask"
        pipe = transformers.pipeline(task, model=str(tmp_path), device="cpu")
        assert pipe("w1 w2 [MASK] w3", **({"max_new_tokens": 4} if case.is_causal else {}))

    def test_offloaded_layers_compute_the_same(self, case: Case, tmp_path: Path) -> None:
        model = case.model()
        model.save_pretrained(tmp_path / "model")
        homes = {name: "cpu" for name, _ in model.named_children()}
        homes |= {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
        homes |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
        homes.pop("model")
        auto_class = getattr(transformers, case.main_head)
        again = auto_class.from_pretrained(tmp_path / "model", device_map=homes, offload_folder=tmp_path / "disk")
        ids = random_ids(2, 9)
        with torch.no_grad():
            torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=1e-6, rtol=1e-6)

    def test_loaded_in_one_precision(self, case: Case, tmp_path: Path) -> None:
        """Sharding (FSDP2) wants parameters of one dtype. Spans, which bfloat16 would move by many tokens, are not."""
        case.model().save_pretrained(tmp_path)
        auto_class = getattr(transformers, case.main_head)
        again = auto_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
        spans = {parameter for module in span_modules(again) for parameter in module.parameters()}
        assert {parameter.dtype for parameter in again.parameters() if parameter not in spans} == {torch.bfloat16}
        assert all(parameter.dtype == torch.float32 for parameter in spans)

    def test_serving_engines_are_served_right_or_refused(self, case: Case) -> None:
        config = case.config()
        if not getattr(config, "is_centered", True):
            pytest.skip("plain softmax attention is what those engines compute")
        for engine in ("vllm", "sglang", "paged|eager"):
            model = case.model()
            model.config._attn_implementation = engine
            with pytest.raises(hea.UnsupportedBackendError, match="running mean|attention pattern"):
                model(random_ids(1, 4))

    def test_trains_and_the_loss_falls(self, case: Case) -> None:
        torch.manual_seed(0)
        model = case.heads[case.main_head](case.config()).train()
        inputs = head_inputs(case.main_head)
        optimizer = torch.optim.AdamW(hea.optimizer_groups(model, 0.1), lr=1e-2)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.5


class GenerationContract:
    """The promises about caches and `generate`, for causal cases."""

    def generate(self, model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        mask = torch.ones_like(ids) if mask is None else mask
        return model.generate(ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)

    def left_padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        ids = random_ids(3, 9)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        mask[2, :1] = 0
        return ids.masked_fill(mask == 0, 0), mask

    def test_token_by_token_equals_full_forward(self, case: Case) -> None:
        model = case.model()
        ids, mask = self.left_padded()
        with torch.no_grad():
            full = model(ids, attention_mask=mask, use_cache=False).logits
            for chunk in (1, 4):
                cache, parts = None, []
                for start in range(0, ids.shape[1], chunk):
                    stop = min(start + chunk, ids.shape[1])
                    out = model(
                        ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True
                    )
                    cache = out.past_key_values
                    parts.append(out.logits)
                real = mask.bool()
                torch.testing.assert_close(torch.cat(parts, 1)[real], full[real], atol=TOLERANCE, rtol=TOLERANCE)

    @pytest.mark.parametrize(
        "options",
        [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"num_beams": 2, "num_return_sequences": 2}],
    )
    def test_cached_generation_equals_uncached(self, case: Case, options: dict[str, Any]) -> None:
        model = case.model()
        ids, mask = self.left_padded()
        cached = self.generate(model, ids, mask, use_cache=True, **options)
        options = {name: value for name, value in options.items() if name != "cache_implementation"}
        assert torch.equal(cached, self.generate(model, ids, mask, use_cache=False, **options))

    # with a prompt that ends in padding transformers warns, too
    @pytest.mark.parametrize("tail", [0, 2])
    def test_cached_generation_equals_uncached_where_the_mask_has_holes(self, case: Case, tail: int) -> None:
        """A hole, a masked token between others, is not read; distances count it, and no document ends there."""
        model, ids = case.model(), random_ids(3, 9)
        mask = torch.ones_like(ids)
        mask[0, 3:5] = mask[1, :2] = mask[2, 1] = mask[2, 6] = 0
        mask[1:, 9 - tail :] = 0
        results = [
            self.generate(model, ids, mask, use_cache=use_cache, return_dict_in_generate=True, output_logits=True)
            for use_cache in (True, False)
        ]
        for cached, uncached in zip(*(result.logits for result in results), strict=True):
            torch.testing.assert_close(cached, uncached, atol=TOLERANCE, rtol=TOLERANCE)

    def test_assisted_generation_equals_greedy(self, case: Case) -> None:
        model, assistant = case.model(), case.model(seed=1)
        ids = random_ids(1, 6)
        assisted = self.generate(model, ids, assistant_model=assistant)
        assert torch.equal(assisted, self.generate(model, ids))
        looked_up = self.generate(model, ids, prompt_lookup_num_tokens=3)
        assert torch.equal(looked_up, self.generate(model, ids))

    def test_cropped_cache_continues_exactly(self, case: Case) -> None:
        model = case.model()
        ids, mask = self.left_padded()
        with torch.no_grad():
            cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
            cache.crop(-3)
            rest = model(ids[:, -3:], attention_mask=mask, past_key_values=cache, use_cache=True).logits
            full = model(ids, attention_mask=mask, use_cache=False).logits[:, -3:]
        torch.testing.assert_close(rest, full, atol=TOLERANCE, rtol=TOLERANCE)

    def test_cache_made_by_the_caller_is_used(self, case: Case) -> None:
        model = case.model()
        ids = random_ids(2, 8)
        with torch.no_grad():
            full = model(ids, use_cache=False).logits
            for cache in (
                transformers.DynamicCache(),
                transformers.DynamicCache(config=model.config),
                transformers.StaticCache(config=model.config, max_cache_len=12),
            ):
                model(ids[:, :5], past_key_values=cache)
                last = model(ids[:, 5:], past_key_values=cache).logits
                torch.testing.assert_close(last, full[:, 5:], atol=TOLERANCE, rtol=TOLERANCE)

    def test_cache_holds_no_more_than_the_tokens(self, case: Case) -> None:
        model = case.model()
        cache = model(random_ids(2, 9), use_cache=True).past_key_values
        # global tokens with projections of their own need keys of their own
        groups = model.config.key_value_heads * (1 + getattr(model.config, "global_projections", False))
        size = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
        assert size == model.config.num_hidden_layers * 2 * 2 * groups * 9 * model.config.head_dim

    def test_future_tokens_do_not_leak(self, case: Case) -> None:
        model = case.model()
        ids = random_ids(1, 10)
        changed = ids.clone()
        changed[0, 6:] = (changed[0, 6:] + 7) % 50 + 3
        with torch.no_grad():
            before, after = model(ids).logits, model(changed).logits
        assert torch.equal(before[:, :6], after[:, :6]) or torch.allclose(before[:, :6], after[:, :6], atol=1e-6)
        assert not torch.allclose(before[:, 6:], after[:, 6:], atol=1e-3)

    def test_continuous_batching_is_right_or_refused(self, case: Case) -> None:
        model = case.model()
        is_refused = getattr(model.config, "is_centered", True) or model.config.position_embedding_type == "alibi"
        if is_refused:
            with pytest.raises(hea.UnsupportedBackendError):
                model(random_ids(1, 4), cache=object())
            return
        prompts = [random_ids(1, length, seed=length)[0].tolist() for length in (4, 7, 3)]
        options = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
        # without sizes transformers takes nine tenths of the machine's free memory
        sizes = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
        batched = model.generate_batch(prompts, options, sizes)
        order = sorted(batched.values(), key=lambda result: int(result.request_id.rpartition("_")[2]))
        for prompt, result in zip(prompts, order, strict=True):
            alone = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=-1)
            assert result.generated_tokens == alone[0, len(prompt) :].tolist()
