"""What every causal family satisfies in `generate` and with caches. `test_contract.py` runs it for every case."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from models.shared_checks import BEAMS, check_cached_generation, check_compiled_steps, decode
from models_cases import TOLERANCE, Case, random_ids
from transformers.generation.continuous_batching.cache import PagedAttentionCache

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT


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

    def test_nothing_stands_between_the_backbone_and_the_vocabulary(self, routed_case: Case) -> None:
        """Libraries compute the loss from the two, without the head's forward, as TRL does."""
        model, (ids, mask) = routed_case.model(), self.left_padded()
        with torch.no_grad():
            states = model.base_model(ids, attention_mask=mask).last_hidden_state
            expected = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(model.get_output_embeddings()(states), expected)

    def test_token_by_token_equals_full_forward(self, case: Case) -> None:
        for changes in ({}, *case.choices):
            self.check_steps(case.model(**changes))

    def check_steps(self, model: Any) -> None:
        ids, mask = self.left_padded()
        with torch.no_grad():
            full = model(ids, attention_mask=mask, use_cache=False).logits
            for sizes in ([1] * 9, [4, 4, 1]):
                found, real = decode(model, ids, sizes, mask=mask)[0], mask.bool()
                torch.testing.assert_close(found[real], full[real], atol=TOLERANCE, rtol=TOLERANCE)

    def test_cached_generation_equals_uncached(self, case: Case) -> None:
        check_cached_generation(partial(self.generate, case.model(), *self.left_padded()), ["static"])

    @pytest.mark.parametrize("options", BEAMS)
    def test_cached_beams_equal_uncached_ones(self, routed_case: Case, options: dict[str, Any]) -> None:
        """Which reorder the cache: the same of all cases that keep the same."""
        check_cached_generation(partial(self.generate, routed_case.model(), *self.left_padded()), **options)

    # with a prompt that ends in padding transformers warns, too; the first text does not end so
    @pytest.mark.parametrize("tail", [pytest.param(0, marks=pytest.mark.thorough), 2])
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

    def test_a_prompt_may_be_given_by_its_embeddings(self, routed_case: Case) -> None:
        """Alone, or beside its ids, which are then returned before the new tokens."""
        model, (ids, mask) = routed_case.model(), self.left_padded()
        options = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
        expected, embeds = self.generate(model, ids, mask), model.get_input_embeddings()(ids)
        assert torch.equal(model.generate(inputs_embeds=embeds, **options), expected[:, ids.shape[1] :])
        assert torch.equal(model.generate(ids, inputs_embeds=embeds, **options), expected)

    def test_assisted_generation_equals_greedy(self, routed_case: Case) -> None:
        model, assistant = routed_case.model(), routed_case.model(seed=1)
        ids = random_ids(1, 6)
        if model._is_stateful:
            for options in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
                with pytest.raises(ValueError, match="not supported with stateful models"):
                    self.generate(model, ids, **options)
            return
        assisted = self.generate(model, ids, assistant_model=assistant)
        assert torch.equal(assisted, self.generate(model, ids))
        looked_up = self.generate(model, ids, prompt_lookup_num_tokens=3)
        assert torch.equal(looked_up, self.generate(model, ids))

    def test_early_exit_equals_greedy(self, routed_case: Case) -> None:
        """Transformers drafts tokens with fewer layers: it lowers `num_hidden_layers` of the config for some calls."""
        model, ids = routed_case.model(), random_ids(1, 6)
        num_layers = model.config.num_hidden_layers
        if model._is_stateful:
            with pytest.raises(ValueError, match="not supported with stateful models"):
                self.generate(model, ids, assistant_early_exit=1)
        else:
            # of the last layer, called by the first only
            calls: list[int] = []
            hook = model.model.layers[-1].register_forward_pre_hook(lambda *_: calls.append(1))
            expected, all_calls = self.generate(model, ids), len(calls)
            assert torch.equal(self.generate(model, ids, assistant_early_exit=1), expected)
            hook.remove()
            assert len(calls) < 2 * all_calls + 1
        assert model.config.num_hidden_layers == num_layers

    def test_cropped_cache_continues_exactly(self, case: Case) -> None:
        model = case.model()
        ids, mask = self.left_padded()
        with torch.no_grad():
            cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
            if model._is_stateful:
                with pytest.raises(hea.UnsupportedBackendError, match="cannot be cropped"):
                    cache.crop(-3)
                return
            cache.crop(-3)
            rest = model(ids[:, -3:], attention_mask=mask, **{CACHE_ARGUMENT: cache}, use_cache=True).logits
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
                model(ids[:, :5], **{CACHE_ARGUMENT: cache})
                last = model(ids[:, 5:], **{CACHE_ARGUMENT: cache}).logits
                torch.testing.assert_close(last, full[:, 5:], atol=TOLERANCE, rtol=TOLERANCE)

    def test_a_matrix_says_what_is_read_in_a_static_cache(self, case: Case) -> None:
        model, ids = case.model(), random_ids(2, 9)
        model.set_attn_implementation("efficient")
        cache = transformers.StaticCache(config=model.config, max_cache_len=12)
        with torch.no_grad():
            full = model(ids, use_cache=False).logits
            for start, stop in ((0, 5), (5, 6), (6, 9)):
                matrix = torch.ones(2, 1, stop - start, 12, dtype=torch.bool).tril(start)
                try:
                    step = model(ids[:, start:stop], attention_mask=matrix, **{CACHE_ARGUMENT: cache}).logits
                except hea.EfficientAttentionError:
                    # mechanisms that take no matrices say so
                    return
                torch.testing.assert_close(step, full[:, start:stop], atol=TOLERANCE, rtol=TOLERANCE)

    # with weights, one case is compiled behind the contract
    @pytest.mark.filterwarnings("ignore:output_attentions=True")
    @pytest.mark.parametrize("need_weights", [False, pytest.param(True, marks=pytest.mark.thorough)])
    def test_compiled_steps_in_a_static_cache_compute_what_eager_ones_do(
        self, traced_case: Case, need_weights: bool
    ) -> None:
        model, (ids, mask) = traced_case.model(**traced_case.fewest_layers), self.left_padded()
        model.set_attn_implementation("efficient")
        check_compiled_steps(model, ids, need_weights, attention_mask=mask)

    def test_packed_documents_fill_a_static_cache(self, case: Case) -> None:
        model, ids = case.model(), random_ids(2, 12)
        positions = torch.cat([torch.arange(length) for length in (7, 5)])[None]
        for kernel in ("efficient", "sdpa", "eager"):
            model.set_attn_implementation(kernel)
            cache = transformers.StaticCache(config=model.config, max_cache_len=20)
            with torch.no_grad():
                expected = model(ids, position_ids=positions, use_cache=False).logits
                found = model(ids, position_ids=positions, **{CACHE_ARGUMENT: cache}).logits
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)

    def test_cache_holds_no_more_than_the_tokens(self, case: Case) -> None:
        model = case.model()
        cache = model(random_ids(2, 9), use_cache=True).past_key_values
        if hasattr(model.config, "cached_numbers"):
            layers = [model.config.cached_numbers(layer, 9) for layer in range(model.config.num_hidden_layers)]
            assert [(layer.keys.numel() + layer.values.numel()) / 2 for layer in cache.layers] == layers
            return
        # global tokens with projections of their own need keys of their own
        groups = model.config.key_value_heads * (1 + getattr(model.config, "global_projections", False))
        # a token and the span behind it
        groups *= getattr(model.config, "nodes_per_token", 1)
        size = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
        # layers that route keep the two digits of a key's cluster behind it
        routing_heads = getattr(model.config, "routing_heads", lambda layer: 0)
        digits = sum(2 for layer in range(model.config.num_hidden_layers) if routing_heads(layer))
        assert size == 2 * groups * 9 * (model.config.num_hidden_layers * 2 * model.config.head_dim + digits)

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
                model(random_ids(1, 4), cache=PagedAttentionCache.__new__(PagedAttentionCache))
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
