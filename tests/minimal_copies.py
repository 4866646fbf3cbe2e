"""Models that are saved with their code, in an environment with only torch and transformers.

    python minimal_copies.py FOLDER

saves three of them, with the package on PYTHONPATH, and what they compute; and then

    python minimal_copies.py FOLDER --load

without it loads them again, computes the same bit for bit, trains one step to the same weights and generates the same
tokens. A script, not a pytest file: there is no pytest in that environment.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(2, 34).view(2, 16)


def used(model: Any) -> dict[str, torch.Tensor]:
    """Return what a model computes, generates, and computes after one step of training."""
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        found = {"logits": model.eval()(IDS).logits, "text": model.generate(IDS, **options)}
    found["without cache"] = model.generate(IDS, use_cache=False, **options)
    model.train()(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        return {**found, "trained": model.eval()(IDS).logits}


def save(folder: Path) -> None:
    import hf_efficient_attn as hea

    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))
    spans = hea.AdaptiveSpanForCausalLM(hea.AdaptiveSpanConfig.modern(**SIZES, span_limit=8))
    config = hea.SparseTransformerConfig(**SIZES, is_causal=True, position_embedding_type="rope")
    indexed = hea.index_stage(hea.index(hea.SparseTransformerForCausalLM(config), top_k=4, num_heads=2), "sparse")
    models = {"llama": hea.sparsify(llama, hea.patterns.Band(4, 0)), "spans": spans, "indexed": indexed}
    for name, model in models.items():
        hea.hub.include_code(model).save_pretrained(folder / name)
        torch.save(used(model), folder / f"{name}.pt")


def load(folder: Path) -> None:
    assert importlib.util.find_spec("hf_efficient_attn") is None, "the package is on the path"
    for name in ("llama", "spans", "indexed"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, trust_remote_code=True)
        expected, found = torch.load(folder / f"{name}.pt"), used(model)
        for quantity, value in expected.items():
            assert torch.equal(found[quantity], value), (name, quantity)
        assert torch.equal(found["text"], found["without cache"]), name
        assert not torch.equal(found["trained"], found["logits"]), name
    print(
        f"three models load with their code alone on torch {torch.__version__}, transformers {transformers.__version__}"
    )


if __name__ == "__main__":
    (load if "--load" in sys.argv else save)(Path(sys.argv[1]))
