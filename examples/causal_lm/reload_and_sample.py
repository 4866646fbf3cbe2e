"""Load a saved model as its users will, in a process of its own, and print what came out as JSON.

    python examples/causal_lm/reload_and_sample.py FOLDER REFERENCE.safetensors PROMPT

REFERENCE holds `input_ids` and the `logits` the training process computed for them.
"""

import json
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, pipeline, set_seed

import hf_efficient_attn  # noqa: F401  registers the family with the Auto classes


def main(folder: str, reference_file: str, prompt: str) -> None:
    reference = load_file(reference_file)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(reference["input_ids"]).logits
    difference = (logits - reference["logits"]).abs().max().item()
    set_seed(0)
    generate = pipeline("text-generation", model=folder, device="cpu")
    options = {"max_new_tokens": 64, "do_sample": True, "temperature": 0.7, "top_k": 50, "return_full_text": False}
    sample = generate(prompt, **options)[0]["generated_text"]
    print(json.dumps({"max_logit_difference": difference, "sample": sample}))


if __name__ == "__main__":
    main(*sys.argv[1:])
