"""Every model of `shared_models` is pushed twice and pulled in all ways over the Hub; a process of its own.

    python repository_client.py '["simplified", "llama", …]'

Prints one line of JSON: for each name what was found, or the traceback where something raised.
"""

import json
import sys
import traceback
from typing import Any

import peft
import torch
import transformers
from huggingface_hub import ModelCard, constants, get_session, hf_raise_for_status, list_repo_files
from models_cases import trainer_arguments
from sharing.compared import output_digest
from sharing.shared_models import shared_model
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea
from hf_efficient_attn.models.base import FamilyPreTrainedModel

VOCABULARY = 300
NEW_TOKENS = 5
TEXT = "w1 w2 [MASK] w3"


def pushed(name: str, repo: str) -> dict[str, Any]:
    """Push two versions of a model, in shards, with a tokenizer; return the digests of both, and the first commit."""
    model = shared_model(name)
    if model.can_generate():
        model.generation_config.max_new_tokens = NEW_TOKENS
    first = model.push_to_hub(repo, max_shard_size="20kB")
    if not isinstance(model, FamilyPreTrainedModel):
        hea.hub.model_card(model, repo).push_to_hub(repo)
    digests = [output_digest(model)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    word_tokenizer(VOCABULARY).push_to_hub(repo)
    model.push_to_hub(repo, max_shard_size="20kB", tags=["second"])
    return {"digests": [*digests, output_digest(model)], "first_commit": first.oid, "class": type(model).__name__}


def validate(card: ModelCard, repo_type: str | None = None) -> None:
    """Let the Hub check a card; older versions of huggingface_hub ask the public one, whatever the endpoint is."""
    body = {"repoType": card.repo_type, "content": str(card)}
    hf_raise_for_status(get_session().post(f"{constants.ENDPOINT}/api/validate-yaml", json=body))


ModelCard.validate = validate  # type: ignore[method-assign]


def pulled(repo: str, revision: str) -> dict[str, Any]:
    """Pull both versions by the Auto class that the card says; use the second in a pipeline and for generation."""
    card = ModelCard.load(repo)
    validate(card)
    head = card.text.partition("from transformers import ")[2].partition("\n")[0]
    auto_class = getattr(transformers, head)
    model = auto_class.from_pretrained(repo)
    task = card.data.pipeline_tag
    new = model.generation_config.max_new_tokens if model.can_generate() else None
    return {
        "class": type(model).__name__,
        "pattern": getattr(model.config, "attention_pattern", None),
        "digests": [output_digest(auto_class.from_pretrained(repo, revision=revision)), output_digest(model)],
        "max_new_tokens": new,
        "answer": task and bool(transformers.pipeline(task, model=repo, device="cpu")(TEXT)),
        "generated": new and model.generate(torch.tensor([[5, 6, 7]]), min_new_tokens=new).shape[1],
        "files": list_repo_files(repo),
        "card": card.text,
        "tags": card.data.tags,
        "adapter": adapter(model, head, f"{repo}_adapter"),
    }


def adapter(base: Any, head: str, repo: str) -> list[str]:
    """Push an adapter of a model of the Hub; return the digests of what was pushed, and of what is loaded by name."""
    config = peft.LoraConfig(target_modules="all-linear", r=1, init_lora_weights=False)
    adapted = peft.get_peft_model(base, config).eval()
    adapted.push_to_hub(repo)
    loaded = getattr(transformers, head).from_pretrained(repo)
    return [output_digest(adapted.base_model.model), output_digest(loaded)]


def trained() -> dict[str, Any]:
    """Let Trainer push a model after a step, and pull it by its name."""
    repo, model = "tester/trained", shared_model("simplified_transformer")
    args = trainer_arguments("run", max_steps=1, per_device_train_batch_size=2, hub_model_id=repo)
    rows = [{"input_ids": [*range(start, start + 8)], "labels": [*range(start, start + 8)]} for start in range(2)]
    trainer = transformers.Trainer(model, args, train_dataset=rows, processing_class=word_tokenizer(VOCABULARY))
    trainer.data_collator = transformers.default_data_collator
    trainer.train()
    trainer.push_to_hub()
    pulled_again = transformers.AutoModelForCausalLM.from_pretrained(repo)
    return {
        "digests": [output_digest(model.eval()), output_digest(pulled_again)],
        "tags": ModelCard.load(repo).data.tags,
        "files": list_repo_files(repo),
    }


def answer(name: str) -> dict[str, Any]:
    repo = f"tester/{name}"
    try:
        sent = pushed(name, repo)
        return {"sent": sent, "got": pulled(repo, sent["first_commit"])}
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    print("\n" + json.dumps({**{name: answer(name) for name in json.loads(sys.argv[1])}, "trained": trained()}))
