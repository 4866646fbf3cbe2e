"""What the users of the Hub do in test_hub.py, each user in a process of its own.

    python hub_client.py '[["fetch", "tester/model"], …]'

runs the commands in turn and prints one line of JSON, the list of their answers. Imports stand in the functions because
one of the users must not import the package.
"""

import copy
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

PROMPT = "the quick brown fox"
HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def push(repo: str, dtype: str, block: str, matrix_init: str) -> dict[str, Any]:
    """Push model, generation config and tokenizer; return what the receiver must find."""
    import torch

    import hf_efficient_attn as hea

    config = hea.SimplifiedTransformerConfig(**SIZES, block=block, matrix_init=matrix_init)
    model = scatter(hea.SimplifiedTransformerForCausalLM(config)).to(getattr(torch, dtype)).eval()
    model.generation_config.max_new_tokens = 7
    model.generation_config.repetition_penalty = 1.5
    tokenizer = train_tokenizer()
    model.push_to_hub(repo)
    tokenizer.push_to_hub(repo)
    return describe(model, tokenizer)


def fetch(repo: str) -> dict[str, Any]:
    """Load by the Auto classes, knowing nothing but the name."""
    import transformers

    import hf_efficient_attn  # noqa: F401

    model = transformers.AutoModelForCausalLM.from_pretrained(repo)
    tokenizer = transformers.AutoTokenizer.from_pretrained(repo)
    pipe = transformers.pipeline("text-generation", model=repo)
    [answer] = pipe(PROMPT, do_sample=False, return_full_text=False)
    return {**describe(model, tokenizer), "pipeline": answer["generated_text"], "class": type(model).__name__}


def fetch_without_package(repo: str) -> dict[str, Any]:
    """Load by the Auto class without having imported the package; return the error."""
    import transformers

    try:
        transformers.AutoModelForCausalLM.from_pretrained(repo)
    except ValueError as error:
        return {"error": str(error), "package_imported": "hf_efficient_attn" in sys.modules}
    return {"error": None}


def train_and_push(repo: str, folder: str) -> dict[str, Any]:
    """Train two steps and push by Trainer, which writes the model card."""
    import transformers

    import hf_efficient_attn as hea

    model = hea.SimplifiedTransformerForCausalLM(hea.SimplifiedTransformerConfig(**SIZES))
    ids = [list(range(start, start + 8)) for start in range(8)]
    args = transformers.TrainingArguments(
        folder, max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to="none", hub_model_id=repo
    )
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        processing_class=train_tokenizer(),
        data_collator=transformers.default_data_collator,
    )
    trainer.train()
    trainer.push_to_hub()
    return describe(model.eval(), trainer.processing_class)


def save_heads(folder: str) -> dict[str, str]:
    """Save every bidirectional head, with both kinds of W_init; return the digest of each one's output."""
    import hf_efficient_attn as hea

    digests = {}
    for matrix_init in ("identity", "orthogonal"):
        for head in HEADS:
            config = hea.SimplifiedTransformerConfig(
                **SIZES, block="sas", is_causal=False, matrix_init=matrix_init, num_labels=3
            )
            model = scatter(getattr(hea, f"SimplifiedTransformerFor{head}")(config)).eval()
            name = f"{head}-{matrix_init}"
            model.save_pretrained(Path(folder) / name)
            digests[name] = output_digest(model)
    return digests


def load_heads(folder: str) -> dict[str, str]:
    """Load every folder by the Auto class of its head; return the digest of each one's output."""
    import transformers

    import hf_efficient_attn  # noqa: F401

    digests = {}
    for saved in sorted(Path(folder).iterdir()):
        auto_class = getattr(transformers, f"AutoModelFor{saved.name.split('-')[0]}")
        digests[saved.name] = output_digest(auto_class.from_pretrained(saved))
    return digests


def scatter(model: Any) -> Any:
    """Move every weight and fixed W_init away from where initialisation puts it, so that none can be lost unseen."""
    import torch

    torch.manual_seed(0)
    fixed = [buffer for name, buffer in model.named_buffers() if name.endswith("initial_weight")]
    with torch.no_grad():
        for tensor in [*model.parameters(), *fixed]:
            tensor.add_(0.1 * torch.randn_like(tensor))
    return model


def describe(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return what sender and receiver must agree on: output to the bit, tokens, greedy text, generation defaults."""
    inputs = tokenizer(PROMPT, return_tensors="pt")
    generated = model.generate(**inputs, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return {
        "dtype": str(model.dtype),
        "digest": output_digest(model),
        "prompt_ids": inputs["input_ids"].tolist(),
        "text": tokenizer.decode(generated, skip_special_tokens=True),
        "new_tokens": len(generated),
        "max_new_tokens": model.generation_config.max_new_tokens,
        "repetition_penalty": model.generation_config.repetition_penalty,
    }


def output_digest(model: Any, of_a_copy: bool = True) -> str:
    """Return the SHA-256 of every output number of one forward over a batch with padding.

    From a copy of the model: weights that from_pretrained maps from a file lie at other alignments than new ones, which
    lets the CPU's matrix kernels round differently (6e-8 seen) though the weights are equal to the last bit.
    """
    import torch

    model = copy.deepcopy(model) if of_a_copy else model
    ids = torch.arange(2, 34).view(2, 16) * 7 % 300
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    if "MultipleChoice" in type(model).__name__:
        ids, mask = ids.unsqueeze(0), mask.unsqueeze(0)
    read = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        outputs = model(input_ids=ids, attention_mask=mask, **read)
    numbers = [value for value in outputs.values() if isinstance(value, torch.Tensor)]
    assert all(value.isfinite().all() for value in numbers)
    return hashlib.sha256(b"".join(value.float().numpy().tobytes() for value in numbers)).hexdigest()


def train_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer of 300 tokens, trained on one line of text."""
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{PROMPT} jumps over the lazy dog"] * 8, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>")


COMMANDS = (push, fetch, fetch_without_package, train_and_push, save_heads, load_heads)

if __name__ == "__main__":
    by_name = {function.__name__: function for function in COMMANDS}
    # behind a question of transformers, which nobody has answered
    print("\n" + json.dumps([by_name[name](*arguments) for name, *arguments in json.loads(sys.argv[1])]))
