"""Let the processes of torchrun share every text of saved models, and save what they compute together.

    torchrun --nproc_per_node 2 sharded_models_script.py FOLDER PART

Reads FOLDER/{name}/ and writes FOLDER/{name}.pt from the first process: the logits of all tokens, the loss, the mean
of the processes' gradients, and what was said.
"""

import copy
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

import hf_efficient_attn as hea
from hf_efficient_attn.attention.sharded.shards import shard_bounds
from hf_efficient_attn.integration.names import has_indexer
from hf_efficient_attn.models.base import FamilyPreTrainedModel
from hf_efficient_attn.models.spans.module import span_modules

# its class that counts what is sent
sys.path.append(str(Path(__file__).parents[1] / "model_cards" / "benchmarks"))

from sequence import Link  # noqa: E402

ROWS, TOKENS, WIDTH = 2, 27, 24
# the models are computed in so many parts, none of which takes too long
PARTS = 2
# the first row is packed, with a document that lies on several processes
LENGTHS = (5, 13, 9)
# whose bytes `explain` cannot say: the text decides, or heads of other distances are computed apart
UNSAID = ("sparse-chosen", "sparse-relative", "span-dynamic", "simplified-sas_p-span")


def batch(name: str, vocabulary: int) -> dict[str, Tensor]:
    """Return whole texts: ids or embeddings, labels, and a padding mask or, of packed texts, positions."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (ROWS, TOKENS), generator=generator)
    inputs = {"input_ids": ids, "labels": torch.where(ids % 3 == 0, -100, ids)}
    if "packed" in name:
        restarted = torch.cat([torch.arange(length) for length in LENGTHS])
        return {**inputs, "position_ids": torch.stack([restarted, torch.arange(TOKENS)])}
    if "embedded" in name:
        inputs["inputs_embeds"] = torch.randn(ROWS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
        del inputs["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, : TOKENS // 2] = 0
    mask[1, -3:] = 0
    return {**inputs, "attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}


def load(path: Path) -> Any:
    """Return a saved model in float64; ours, and those with indexers, in training, in which some of them do more."""
    architecture = transformers.AutoConfig.from_pretrained(path).architectures[0]
    model_class = getattr(hea, architecture, None) or getattr(transformers, architecture)
    model = model_class.from_pretrained(path, attn_implementation="efficient").double()
    return model.train(isinstance(model, FamilyPreTrainedModel) or has_indexer(model.config))


def results(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the logits, the loss and the gradients of a call, and the buffers and spans after it."""
    model.zero_grad()
    options = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    # losses and rotary positions are computed in single precision, whatever the weights have
    with patch.object(Tensor, "float", Tensor.double), patch.object(torch, "float", torch.double):
        found = model(**inputs, **options)
    found.loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    buffers = {f"buffer {name}": each.clone() for name, each in model.named_buffers() if each.is_floating_point()}
    spans = {f"spans {each.layer_idx}": each.head_spans() for each in span_modules(model)}
    return {"logits": found.logits.detach(), "loss": found.loss.detach(), **gradients, **buffers, **spans}


def together(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same of all processes: their logits side by side, and the mean of the others."""
    found = results(model, inputs)
    size = distributed.get_world_size()
    logits = found.pop("logits")
    lengths = [stop - first for first, stop in shard_bounds(TOKENS, size)]
    padded = torch.nn.functional.pad(logits, (0, 0, 0, max(lengths) - logits.shape[1]))
    everywhere = [torch.empty_like(padded) for _ in range(size)]
    distributed.all_gather(everywhere, padded)
    for each in found.values():
        distributed.all_reduce(each)
        each /= size
    whole = [each[:, :length] for each, length in zip(everywhere, lengths, strict=True)]
    return {"logits": torch.cat(whole, 1), **found}


def check_bytes(model: Any) -> None:
    """Check that a model of ours sends what `explain` says of its layers."""
    model = copy.deepcopy(model).float().eval()
    ids = torch.randint(3, model.config.vocab_size, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    try:
        exchange = [hea.explain(model, TOKENS, layer=layer).exchange for layer in range(model.config.num_hidden_layers)]
    except hea.UnsupportedBackendError:
        # layers that ask the engine for nothing are not explained
        return
    if None in exchange:
        # they send more than is forecast
        return
    with Link(0) as link, torch.no_grad():
        model(ids)
    assert link.sent == ROWS * sum(each.forward_bytes[distributed.get_rank()] for each in exchange)


def check_autocast(model: Any, inputs: dict[str, Tensor]) -> None:
    """Check that a training step has the same loss in bfloat16, by autocast, but for rounding."""
    if "input_ids" not in inputs or "position_ids" in inputs:
        return
    model = copy.deepcopy(model).float()
    losses = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(**inputs).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1].float(), losses[0], atol=0, rtol=0.05)
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())


def raised_by(action: Callable[[], Any]) -> str:
    try:
        action()
    except hea.EfficientAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def of_other_batches(model: Any, inputs: dict[str, Tensor]) -> dict[str, str]:
    """Return what is said where the last process is called with something else than the others."""
    others: dict[str, dict[str, Tensor | None]] = {
        "other rows": {name: inputs[name].flip(0) for name in ("input_ids", "labels")},
        "other labels": {"labels": inputs["labels"].flip(1)},
        "no labels": {"labels": None},
        "other mask": {"attention_mask": torch.ones_like(inputs["input_ids"])},
        "other documents": {"position_ids": inputs["position_ids"] % 9},
        # alone it would be refused for being too short for all processes
        "other length": {name: each[:, :1] for name, each in inputs.items()},
    }
    is_last = distributed.get_rank() == distributed.get_world_size() - 1
    return {
        name: raised_by(lambda other=other: model(**{**inputs, **(other if is_last else {})}))
        for name, other in others.items()
    }


def said(model: Any, inputs: dict[str, Tensor]) -> dict[str, str]:
    """Return what is refused."""
    ids = inputs["input_ids"]
    square = (1, distributed.get_world_size())
    return {
        **of_other_batches(model, {**inputs, "position_ids": torch.arange(TOKENS).expand(ROWS, -1)}),
        "weights": raised_by(lambda: model(input_ids=ids, output_attentions=True)),
        "matrix": raised_by(lambda: model(input_ids=ids, attention_mask=torch.ones(ROWS, 1, TOKENS, TOKENS))),
        "labels": raised_by(lambda: model(input_ids=ids, output_router_logits=True)),
        "restarts": raised_by(lambda: model(**{**inputs, "position_ids": torch.arange(TOKENS).expand(ROWS, -1) % 9})),
        "short": raised_by(lambda: model(input_ids=ids[:, :1])),
        "mesh": raised_by(lambda: hea.shard_sequence(model, init_device_mesh("cpu", square))),
    }


def divided(model: Any, inputs: dict[str, Tensor], mesh: Any) -> str:
    """Return what is said where a model should deal out heads."""
    return raised_by(lambda: hea.shard_sequence(model, mesh, "heads")(**inputs))


def too_far(model: Any, inputs: dict[str, Tensor], mesh: Any) -> str:
    """Return what is said of positions of which the first process holds none that is too far."""
    far = torch.arange(TOKENS).expand(ROWS, -1) + model.config.max_position_embeddings - TOKENS + 3
    return raised_by(lambda: model(torch.ones_like(far), position_ids=far))


# what is refused of a single case
REFUSED = {
    "sparse-indexed": divided,
    "sparse-chosen": too_far,
}


def main(folder: Path, part: str) -> None:
    """Compute the results of the models in the folder that are in a part of them."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for path in sorted(path for path in folder.iterdir() if path.is_dir())[int(part) :: PARTS]:
        model = hea.shard_sequence(load(path), mesh, "heads" if "heads" in path.name else "auto")
        inputs = batch(path.name, model.config.vocab_size)
        if "checkpointed" in path.name:
            model.train()
            model.gradient_checkpointing_enable()
        found: dict[str, Any] = together(model, inputs)
        if path.name == "llama":
            copied = copy.deepcopy(model)
            assert torch.equal(results(copied, inputs)["loss"], found["loss"])
            found["said"] = said(model, inputs)
            found["whole again"] = results(hea.shard_sequence(model, None), inputs)["logits"]
        if isinstance(model, FamilyPreTrainedModel) and "packed" not in path.name and path.name not in UNSAID:
            check_bytes(model)
        check_autocast(model, inputs)
        if path.name in REFUSED:
            found["said"] = REFUSED[path.name](model, inputs, mesh)
        if distributed.get_rank() == 0:
            torch.save(found, folder / f"{path.name}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
