"""Cached decoding in the authors' order of chunks, which later tokens change: the rule that the model's text gives."""

import torch
from families import BY_NAME
from models_cases import random_ids

from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT

CAUSAL = BY_NAME["reformer-causal"]
# chunks as the authors cut them
AUTHORS = {"chunk_by_bucket": False, "num_hashes": 2}


def test_a_new_token_reads_what_it_would_read_if_the_text_ended_with_it() -> None:
    """In one layer, whose keys and values do not depend on what other tokens read, nothing else differs."""
    model = CAUSAL.model(attn_layers=["lsh"], num_hidden_layers=1, **AUTHORS)
    ids = random_ids(2, 15)
    with torch.no_grad():
        cache = None
        for stop in range(1, 16):
            out = model(ids[:, stop - 1 : stop], **{CACHE_ARGUMENT: cache}, use_cache=True)
            cache = out.past_key_values
            expected = model(ids[:, :stop], use_cache=False).logits[:, -1]
            torch.testing.assert_close(out.logits[:, 0], expected, atol=1e-5, rtol=1e-5)


def test_text_within_a_chunk_decodes_as_the_full_forward() -> None:
    model = CAUSAL.model(lsh_attn_chunk_length=16, **AUTHORS)
    ids = random_ids(2, 15)
    with torch.no_grad():
        cache = model(ids[:, :9], use_cache=True).past_key_values
        rest = model(ids[:, 9:], **{CACHE_ARGUMENT: cache}).logits
        torch.testing.assert_close(rest, model(ids, use_cache=False).logits[:, 9:], atol=1e-5, rtol=1e-5)


def test_rows_of_a_batch_generate_as_they_do_alone() -> None:
    """In transformers all rows read the cached states of the first."""
    model = CAUSAL.model(**AUTHORS)
    ids, short = random_ids(1, 11), random_ids(1, 6, seed=3)
    padded = torch.cat((torch.zeros(1, 5, dtype=torch.long), short), 1)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :5] = 0
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    together = model.generate(torch.cat((ids, padded)), attention_mask=mask, **options)
    for row, alone in enumerate((ids, short)):
        expected = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
        assert torch.equal(together[row, -8:], expected[0, -8:])
