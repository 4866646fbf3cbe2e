"""What every encoder-decoder family satisfies in `generate` and with caches."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from models.shared_checks import GENERATION_OPTIONS, check_cached_generation, check_compiled_steps
from models_cases import TOLERANCE
from seq2seq_cases import TINY, Seq2SeqCase, random_ids
from torch import Tensor
from transformers.generation.continuous_batching.cache import PagedAttentionCache

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT


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

    @pytest.mark.parametrize("options", GENERATION_OPTIONS)
    def test_cached_generation_equals_uncached(self, case: Seq2SeqCase, options: dict[str, Any]) -> None:
        check_cached_generation(partial(self.generate, case.model(), *self.sources()), options)

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
    @pytest.mark.parametrize("need_weights", [False, True])
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
