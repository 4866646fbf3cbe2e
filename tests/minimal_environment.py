"""Import, train one step, generate, save and load, in an environment with only torch and transformers.

A script, not a pytest file: there is no pytest in that environment.
"""

import tempfile

import torch
import transformers

import hf_efficient_attn as hea

shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ids = torch.arange(3, 33).view(2, 15)
for block in ("pre_ln", "parallel", "v_skipinit", "sas", "sas_p", "sas_p_no_norm"):
    config = hea.SimplifiedTransformerConfig(block=block, **shape)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(hea.optimizer_groups(model, 0.1), lr=1e-2)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.eval()
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for beams in (1, 2):
        expected = model.generate(ids, use_cache=False, num_beams=beams, **options)
        for cache in ({}, {"cache_implementation": "static"}):
            assert torch.equal(model.generate(ids, num_beams=beams, **cache, **options), expected), (
                block,
                beams,
                cache,
            )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=1e-6, rtol=1e-6)
print(f"six blocks train, generate and reload on torch {torch.__version__} and transformers {transformers.__version__}")
