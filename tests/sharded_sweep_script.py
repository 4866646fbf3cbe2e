"""Let the processes of torchrun share the texts of classes of transformers, as `sweep/` makes them tiny.

    torchrun --nproc_per_node 2 sharded_sweep_script.py FOLDER NAME...

Writes FOLDER/verdicts.json from the first process: what was found of each class and way to call it.
"""

import copy
import json
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from sweep.classes import Candidate
from sweep.inputs import token_ids
from sweep.table import verdicts
from sweep.tiny import ATTEMPTS, build, tiny_config
from sweep.verdict import REFUSED, RIGHT, WRONG, sentence
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

import hf_efficient_attn as hea
from hf_efficient_attn.attention.sharded.shards import shard_bounds
from hf_efficient_attn.integration.trial import forward_arguments
from hf_efficient_attn.patterns import Band

TOKENS, PADDED_LEFT, PADDED_RIGHT = 25, 7, 6
# shorter than the text, so that its frequencies change
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
TEXT_OF_ROPE = 8
# what models that cannot be called or built in a way raise by themselves
OWN_ERRORS = (ArithmeticError, AttributeError, KeyError, LookupError, NotImplementedError, RuntimeError, TypeError)


def calls(model: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments of whole texts, by what is tried with them."""
    ids = token_ids(TOKENS, 3)
    mask = torch.ones_like(ids)
    mask[0, :PADDED_LEFT], mask[1, -PADDED_RIGHT:] = 0, 0
    padded = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    # id 3 is the mask of those that have one, more of them in the first half
    masked = ids.clone()
    masked[0, 3:9] = 3
    found = {"ids": {"input_ids": masked}, "padding": padded}
    names = forward_arguments(type(model))
    if "inputs_embeds" in names:
        embedded = torch.randn(*ids.shape, model.get_input_embeddings().weight.shape[1], generator=seeded())
        found["embeddings"] = {"inputs_embeds": embedded.to(model.dtype)}
    if "labels" in names:
        found["labels"] = {**padded, "labels": ids.masked_fill(mask == 0, -100)}
    return {**found, "positions": {"input_ids": ids, "position_ids": torch.arange(3, TOKENS + 3)[None].expand(2, -1)}}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def models(candidate: Candidate) -> Iterator[tuple[str, Any]]:
    """Yield the tiny model, and again with frequencies that depend on the length of the text."""
    attempts = ((changes, tiny(candidate, changes)) for changes in ATTEMPTS)
    changes, model = next(((changes, model) for changes, model in attempts if model is not None), ({}, None))
    if model is None:
        return
    yield "", model
    rope = getattr(model.config, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type") == "default":
        fields = {**changes, "rope_parameters": {**rope, **DYNAMIC}, "max_position_embeddings": TEXT_OF_ROPE}
        if (model := tiny(candidate, fields)) is not None:
            yield "dynamic ", model


def tiny(candidate: Candidate, changes: dict[str, Any]) -> Any:
    """Return a tiny model; None: it cannot be built, or called."""
    try:
        model = build(candidate.model_class, tiny_config(candidate.config_class, candidate.kind, **changes))
        # frequencies that depend on the length keep what they were last
        outputs(copy.deepcopy(model), {})
    # the next attempt, as in the sweep
    except Exception:
        return None
    return in_double(model)


def in_double(model: Any) -> Any:
    """Return the model in double precision, or as it is if it cannot compute in that."""
    try:
        outputs(copy.deepcopy(model).double(), {})
    except OWN_ERRORS:
        return model
    return model.double()


def outputs(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return every tensor that a model computes for whole texts."""
    given = {name: each.clone() for name, each in (inputs or {"input_ids": token_ids(TOKENS, 3)}).items()}
    options = {"use_cache": False} if "use_cache" in forward_arguments(type(model)) else {}
    with torch.no_grad():
        found = model(**given, **options)
    return {name: each for name, each in found.items() if torch.is_tensor(each)}


def judge(model: Any, mesh: Any) -> dict[str, str]:
    """Return a verdict on each way to call a model."""
    try:
        hea.sparsify(model, Band(4, 4))
    except hea.EfficientAttentionError:
        model.set_attn_implementation("efficient")
    try:
        sharded = hea.shard_sequence(copy.deepcopy(model), mesh)
    except hea.EfficientAttentionError as error:
        return {"": f"{REFUSED}: {sentence(error)}"}
    found = {}
    for what, inputs in calls(model).items():
        try:
            expected = outputs(model, inputs)
        # what one process cannot compute is no matter of several
        except (*OWN_ERRORS, ValueError):
            continue
        try:
            found[what] = compared(outputs(sharded, inputs), expected, inputs.get("attention_mask"))
        except hea.EfficientAttentionError as error:
            found[what] = f"{REFUSED}: {sentence(error)}"
        except Exception as error:
            found[what] = f"{WRONG}: raises {sentence(error)}"
    return found


def compared(found: dict[str, Tensor], expected: dict[str, Tensor], mask: Tensor | None) -> str:
    """Return the verdict on the outputs of a call; those of padding do not count."""
    is_token = torch.ones(1, TOKENS, dtype=torch.bool) if mask is None else mask.bool()
    for name, each in expected.items():
        whole = found[name] if each.ndim == 0 else gathered(found[name])
        # losses compute in single precision, whatever the weights have
        precision = 1e-6 if each.ndim == 0 else 1e-9 if each.dtype == torch.float64 else 1e-4
        atol = precision * max(float(each.abs().max()), 1.0)
        far = (whole - each).abs() if each.ndim == 0 else (whole - each).abs()[is_token.expand(2, -1)]
        if not float(far.max()) <= atol:
            return f"{WRONG}: {name} is off by {float(far.max()):.1e}"
    return RIGHT


def gathered(part: Tensor) -> Tensor:
    """Return the tokens of all processes side by side."""
    lengths = [stop - first for first, stop in shard_bounds(TOKENS, distributed.get_world_size())]
    padded = torch.nn.functional.pad(part, (0, 0) * (part.ndim - 2) + (0, max(lengths) - part.shape[1])).contiguous()
    everywhere = [torch.empty_like(padded) for _ in lengths]
    distributed.all_gather(everywhere, padded)
    return torch.cat([each[:, :length] for each, length in zip(everywhere, lengths, strict=True)], 1)


def main(folder: Path, *names: str) -> None:
    """Judge the classes."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # what one process alone refuses or fails at, the others wait for
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    table = {}
    for each in verdicts()["classes"]:
        if each["name"] in names:
            candidate = Candidate(each["model_type"], each["kind"], each["name"])
            found = {
                rope + what: said for rope, model in models(candidate) for what, said in judge(model, mesh).items()
            }
            everywhere: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(everywhere, found)
            # one verdict of all processes
            table[each["name"]] = {
                what: max((of_process.get(what, WRONG) for of_process in everywhere), key=lambda said: WRONG in said)
                for what in found
            }
    if distributed.get_rank() == 0:
        (folder / "verdicts.json").write_text(json.dumps(table, indent=1))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
