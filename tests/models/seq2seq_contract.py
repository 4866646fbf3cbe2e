"""What only encoder-decoders satisfy; `shared_contract.py` has what all do. `test_seq2seq_contract.py` runs it."""

import copy
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.shared_checks import (
    BEAMS,
    check_cached_generation,
    check_compiled_steps,
    check_compiled_training,
    check_exported,
    check_save_and_load,
)
from models_cases import TOLERANCE, first_tensor
from seq2seq_cases import TINY, Seq2SeqCase, head_inputs, random_ids
from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT


def padded(ids: Tensor, tokens: int, side: str) -> Tensor:
    """Return the ids with `tokens` of padding, 0, on one side."""
    return torch.nn.functional.pad(ids, (tokens, 0) if side == "left" else (0, tokens))


class Seq2SeqMasksContract:
    """The promises about which tokens of source and target a token reads."""

    def test_source_padding_and_batch_mates_change_nothing(self, case: Seq2SeqCase, auto_class: str) -> None:
        model = case.model(auto_class)
        ids, mate = random_ids(1, 7), random_ids(1, 12, seed=3)
        ids[:, 4] = mate[:, 4] = TINY["eos_token_id"]
        ids[:, 2] = mate[:, 2] = TINY["sep_token_id"]
        rows = torch.cat([padded(ids, 5, "left"), padded(ids, 5, "right"), mate])
        inputs = {"input_ids": rows, "attention_mask": (rows > 0).long()}
        target = {"decoder_input_ids": random_ids(1, 6)} if auto_class in ("AutoModelForSeq2SeqLM", "AutoModel") else {}
        targets = {name: each.expand(3, -1) for name, each in target.items()}
        with torch.no_grad():
            alone = first_tensor(model(ids, **target))
            left, right, _ = first_tensor(model(**inputs, **targets)).split(1)
        if auto_class == "AutoModelForQuestionAnswering":
            left, right = left[:, 5:], right[:, :7]
        for found in (left, right):
            torch.testing.assert_close(found, alone, atol=TOLERANCE, rtol=TOLERANCE)

    def test_target_padding_and_batch_mates_change_nothing(self, case: Seq2SeqCase) -> None:
        model = case.model()
        ids, target, mate = random_ids(1, 9), random_ids(1, 4, seed=5), random_ids(1, 7, seed=6)
        rows = torch.cat([padded(target, 3, "left"), padded(target, 3, "right"), mate])
        with torch.no_grad():
            alone = model(ids, decoder_input_ids=target).logits
            inputs = {"decoder_input_ids": rows, "decoder_attention_mask": (rows > 0).long()}
            left, right, _ = model(ids.expand(3, -1), **inputs).logits.split(1)
        for found in (left[:, 3:], right[:, :4]):
            torch.testing.assert_close(found, alone, atol=TOLERANCE, rtol=TOLERANCE)

    def test_future_target_tokens_do_not_leak(self, case: Seq2SeqCase) -> None:
        model = case.model()
        ids, target = random_ids(1, 9), random_ids(1, 8)
        changed = target.clone()
        changed[0, 5:] = (changed[0, 5:] + 7) % 50 + 3
        with torch.no_grad():
            before, after = (model(ids, decoder_input_ids=each).logits for each in (target, changed))
        torch.testing.assert_close(after[:, :5], before[:, :5], atol=1e-6, rtol=0)
        assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)

    def test_packed_documents_are_refused(self, case: Seq2SeqCase) -> None:
        ids = random_ids(1, 6)
        for name in ("position_ids", "decoder_position_ids"):
            with pytest.raises(hea.InputError, match="cannot be packed"):
                case.model()(ids, decoder_input_ids=ids, **{name: torch.tensor([[0, 1, 2, 0, 1, 2]])})


class Seq2SeqCompileContract:
    """The promises about graphs, whole ones and exported ones; `precision_contract.py` has one for all lengths."""

    def test_compiles_without_graph_breaks(self, traced_case: Seq2SeqCase) -> None:
        model = traced_case.model(embedding_dropout=0.0, hidden_dropout=0.0, **traced_case.fewest_layers).train()
        check_compiled_training(model, head_inputs("AutoModelForSeq2SeqLM"))

    def test_exports_with_any_batch_and_length(self, traced_case: Seq2SeqCase, is_masked: bool) -> None:
        model = traced_case.model(use_cache=False, **traced_case.fewest_layers)

        def inputs(*sizes: int) -> dict[str, Tensor]:
            found = head_inputs("AutoModelForSeq2SeqLM" if is_masked else "AutoModel", *sizes)
            return found if is_masked else {name: found[name] for name in ("input_ids", "decoder_input_ids")}

        batch = torch.export.Dim("batch", min=1, max=64)
        source, target = (torch.export.Dim(name, min=3, max=60) for name in ("source", "target"))
        sides = {"input_ids": source, "attention_mask": source, "labels": target, "decoder_input_ids": target}
        shapes = {name: {0: batch, 1: sides[name]} for name in inputs(3, 12, 6)}
        check_exported(model, inputs, shapes, [(3, 12, 6), (2, 31, 11), (1, 9, 12)])


class Seq2SeqContract(Seq2SeqMasksContract, Seq2SeqCompileContract):
    """One method a promise; `case` and `auto_class` are parametrised by `test_seq2seq_contract.py`."""

    @pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)])
    def test_save_and_load_is_bit_equal(
        self, routed_case: Seq2SeqCase, auto_class: str, tmp_path: Path, dtype: torch.dtype
    ) -> None:
        """`precision_contract.py` loads every case in bfloat16, and compares all parameters and buffers."""
        check_save_and_load(routed_case.model(auto_class).to(dtype), auto_class, head_inputs(auto_class), tmp_path)

    def test_names_that_parallelism_relies_on(self, case: Seq2SeqCase) -> None:
        backbone = case.model("AutoModel")
        assert {"embed_tokens", "encoder", "decoder"} == dict(backbone.named_children()).keys()
        layers = [*backbone.encoder.layers, *backbone.decoder.layers]
        assert {type(layer).__name__ for layer in layers} == set(backbone._no_split_modules)
        assert all(isinstance(layer, GradientCheckpointingLayer) for layer in layers)
        assert backbone._supports_context_parallel is False
        assert set(backbone.tp_plan) >= {f"{side}.layers.*.mlp.up_proj" for side in ("encoder", "decoder")}

    def test_one_embedding_for_source_target_and_output(self, case: Seq2SeqCase) -> None:
        model = case.model()
        assert model.lm_head.weight is model.get_input_embeddings().weight
        model.resize_token_embeddings(70, mean_resizing=False)
        assert model.lm_head.weight is model.get_input_embeddings().weight
        logits = model(torch.tensor([[69, 5, 6]]), decoder_input_ids=torch.tensor([[1, 69]])).logits
        assert logits.shape == (1, 2, 70)
        # which libraries ask of the stacks, too; what is given to one of them is of the whole model
        for stack in (model.get_encoder(), model.get_decoder()):
            assert stack.get_input_embeddings() is model.get_input_embeddings()
            other = copy.deepcopy(model.get_input_embeddings())
            stack.set_input_embeddings(other)
            assert model.model.embed_tokens is other
            model.tie_weights()
            assert model.lm_head.weight is other.weight

    def test_heads_take_inputs_in_the_usual_order(self, case: Seq2SeqCase, auto_class: str) -> None:
        """Trainer passes on only the columns a forward names, and people pass the first by position."""
        parameters = list(inspect.signature(case.heads[auto_class].forward).parameters)
        first = ["input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "encoder_outputs"]
        assert parameters[1:6] == first
        of_family = getattr(case.heads[auto_class], "extra_inputs", ())
        assert {"inputs_embeds", "decoder_inputs_embeds", *of_family} <= set(parameters)

    def test_embeddings_in_the_place_of_tokens(self, case: Seq2SeqCase) -> None:
        model = case.model(**({"global_tokens": None} if hasattr(case.config_class, "global_tokens") else {}))
        ids, target = random_ids(2, 9), random_ids(2, 5)
        with torch.no_grad():
            expected = model(ids, decoder_input_ids=target).logits
            embedded = {"inputs_embeds": model.model.embed(ids), "decoder_inputs_embeds": model.model.embed(target)}
            torch.testing.assert_close(model(**embedded).logits, expected)

    # flex warns that it is not compiled, which the contracts of flex and of the other families do
    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without:UserWarning")
    @pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex_attention"])
    def test_kernels_agree(self, case: Seq2SeqCase, kernel: str) -> None:
        model = case.model()
        inputs = head_inputs("AutoModelForSeq2SeqLM")
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            expected = model(**inputs).logits
            model.set_attn_implementation(kernel)
            # which draw their blocks, or have nodes, by the length of each row
            if kernel == "flex_attention" and case.name.startswith(("seq2seq-bigbird_pegasus", "bp-seq2seq")):
                with pytest.raises(hea.UnsupportedBackendError, match="depends on the length of each"):
                    model(**inputs)
                return
            actual = model(**inputs).logits
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)

    def test_offloaded_layers_compute_the_same(self, case: Seq2SeqCase, tmp_path: Path) -> None:
        model = case.model()
        model.save_pretrained(tmp_path / "model")
        homes = {"lm_head": "cpu", "model.embed_tokens": "cpu"}
        for side in ("encoder", "decoder"):
            homes |= {f"model.{side}.embeddings": "cpu", f"model.{side}.norm": "cpu"}
            homes |= {f"model.{side}.layers.0": "cpu", f"model.{side}.layers.1": "disk"}
        again = transformers.AutoModelForSeq2SeqLM.from_pretrained(
            tmp_path / "model", device_map=homes, offload_folder=tmp_path / "disk"
        )
        ids, target = random_ids(2, 9), random_ids(2, 5)
        with torch.no_grad():
            expected = model(ids, decoder_input_ids=target).logits
            torch.testing.assert_close(again(ids, decoder_input_ids=target).logits, expected, atol=1e-6, rtol=1e-6)


class Seq2SeqGenerationContract:
    """The promises about caches and `generate`."""

    def generate(self, model: Any, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
        return model.generate(ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)

    def sources(self) -> tuple[Tensor, Tensor]:
        """Return three sources, one padded on the left, one on the right."""
        ids = random_ids(3, 9)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        mask[2, -2:] = 0
        return ids.masked_fill(mask == 0, 0), mask

    @pytest.mark.parametrize("chunk", [1, 3])
    def test_token_by_token_equals_full_forward(self, case: Seq2SeqCase, chunk: int) -> None:
        model = case.model()
        ids, mask = self.sources()
        target, target_mask = random_ids(3, 7, seed=8), torch.ones(3, 7, dtype=torch.long)
        target_mask[1, :2] = 0
        cache, parts = None, []
        with torch.no_grad():
            source = model.get_encoder()(ids, mask)
            common = {"encoder_outputs": source, "attention_mask": mask}
            full = model(**common, decoder_input_ids=target, decoder_attention_mask=target_mask, use_cache=False).logits
            for start in range(0, 7, chunk):
                stop = min(start + chunk, 7)
                out = model(
                    **common,
                    decoder_input_ids=target[:, start:stop],
                    decoder_attention_mask=target_mask[:, :stop],
                    **{CACHE_ARGUMENT: cache},
                    use_cache=True,
                )
                cache = out.past_key_values
                parts.append(out.logits)
        real = target_mask.bool()
        torch.testing.assert_close(torch.cat(parts, 1)[real], full[real], atol=TOLERANCE, rtol=TOLERANCE)

    def test_cached_generation_equals_uncached(self, case: Seq2SeqCase) -> None:
        check_cached_generation(partial(self.generate, case.model(), *self.sources()), ["static"])

    @pytest.mark.parametrize("options", BEAMS)
    def test_cached_beams_equal_uncached_ones(self, routed_case: Seq2SeqCase, options: dict[str, Any]) -> None:
        check_cached_generation(partial(self.generate, routed_case.model(), *self.sources()), **options)

    @pytest.mark.parametrize("cache", [None, "static"])
    def test_prompts_padded_on_the_left_generate_the_same(self, case: Seq2SeqCase, cache: str | None) -> None:
        """`generate` wants the start token first, so the padding stands behind it."""
        model = case.model()
        ids, mask = self.sources()
        prompt = torch.tensor([[TINY["decoder_start_token_id"], 5, 6]]).expand(3, -1)
        longer = torch.tensor([[TINY["decoder_start_token_id"], 0, 0, 5, 6]]).expand(3, -1)
        options = {"cache_implementation": cache} if cache else {}
        options |= {"decoder_input_ids": longer, "decoder_attention_mask": (longer > 0).long()}
        together = self.generate(model, ids, mask, **options)
        alone = self.generate(model, ids, mask, decoder_input_ids=prompt)
        assert torch.equal(together[:, 5:], alone[:, 3:])

    def test_batch_mates_change_nothing(self, case: Seq2SeqCase) -> None:
        model = case.model()
        ids, mask = self.sources()
        together = self.generate(model, ids, mask, num_beams=2)
        for row in range(3):
            alone = ids[row][mask[row].bool()][None]
            assert torch.equal(self.generate(model, alone, torch.ones_like(alone), num_beams=2)[0], together[row])

    def test_assisted_generation_equals_greedy(self, case: Seq2SeqCase) -> None:
        model, assistant = case.model(), case.model(seed=1)
        ids = random_ids(1, 6)
        mask = torch.ones_like(ids)
        assert torch.equal(self.generate(model, ids, mask, assistant_model=assistant), self.generate(model, ids, mask))

    def test_source_is_read_once(self, case: Seq2SeqCase) -> None:
        """Keys and values of the source are computed in the first step only; the caches hold no more than tokens."""
        model = case.model()
        calls = []
        for layer in model.model.decoder.layers:
            layer.cross_attn.k_proj.register_forward_hook(lambda *args: calls.append(1))
        ids, mask = self.sources()
        cache = self.generate(model, ids, mask, return_dict_in_generate=True).past_key_values
        assert len(calls) == 2
        width = 2 * 2 * 3 * model.config.hidden_size
        # a token and the span behind it
        nodes = 8 * getattr(model.config, "nodes_per_token", 1)
        for part, tokens in ((cache.self_attention_cache, nodes), (cache.cross_attention_cache, 9)):
            assert sum(layer.keys.numel() + layer.values.numel() for layer in part.layers) == width * tokens

    def test_cache_made_by_the_caller_is_used(self, case: Seq2SeqCase) -> None:
        model = case.model()
        ids, target = random_ids(2, 9), random_ids(2, 7)
        dynamic, config = transformers.DynamicCache, model.config.get_text_config(decoder=True)
        static = [transformers.StaticCache(config=config, max_cache_len=size) for size in (12, 9)]
        with torch.no_grad():
            full = model(ids, decoder_input_ids=target, use_cache=False).logits
            for cache in (
                transformers.EncoderDecoderCache(dynamic(), dynamic()),
                transformers.EncoderDecoderCache(*static),
                dynamic(),
            ):
                model(ids, decoder_input_ids=target[:, :4], **{CACHE_ARGUMENT: cache})
                last = model(ids, decoder_input_ids=target[:, 4:], **{CACHE_ARGUMENT: cache}).logits
                torch.testing.assert_close(last, full[:, 4:], atol=TOLERANCE, rtol=TOLERANCE)

    @pytest.mark.filterwarnings("ignore:output_attentions=True")
    @pytest.mark.parametrize("need_weights", [False, pytest.param(True, marks=pytest.mark.thorough)])
    def test_compiled_steps_in_a_static_cache_compute_what_eager_ones_do(
        self, traced_case: Seq2SeqCase, need_weights: bool
    ) -> None:
        model, (ids, mask) = traced_case.model(**traced_case.fewest_layers), self.sources()
        with torch.no_grad():
            source = {"encoder_outputs": model.get_encoder()(ids, attention_mask=mask), "attention_mask": mask}
        check_compiled_steps(model, random_ids(3, 9, seed=1), need_weights, **source)

    def test_continuous_batching_is_refused(self, case: Seq2SeqCase) -> None:
        cache = PagedAttentionCache.__new__(PagedAttentionCache)
        with pytest.raises(hea.UnsupportedBackendError):
            case.model()(random_ids(1, 4), decoder_input_ids=random_ids(1, 2), cache=cache)
