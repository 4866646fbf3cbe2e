"""Give each process of torchrun a part of every text, let them deal out the heads, and save what they compute.

    torchrun --nproc_per_node 2 sequence_parallel_script.py FOLDER [--deepspeed]

Reads FOLDER/{name}/ and writes FOLDER/{name}.pt from the first process: logits, gradients, and what was said.
`ulysses_attention` does what DeepSpeed's `UlyssesSPAttentionHF` does, which is itself asked with --deepspeed.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, distributed
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_efficient_attn as hea
from hf_efficient_attn.integration.interface import efficient_attention_forward
from hf_efficient_attn.integration.model_info import DEEPSPEED_GROUPS

ROWS, TOKENS = 2, 24
# the first row is packed, with a document that lies in both parts
LENGTHS = (5, 11, 8)


def batch(vocabulary: int) -> dict[str, Tensor]:
    """Return the whole texts: ids, and positions that tell the documents."""
    positions = torch.stack([torch.cat([torch.arange(length) for length in LENGTHS]), torch.arange(TOKENS)])
    ids = torch.randint(3, vocabulary, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "position_ids": positions}


def results(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the logits of these tokens and what they add to the gradient of every parameter."""
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    logits.square().sum().backward()
    return {"logits": logits.detach(), **{name: each.grad for name, each in model.named_parameters()}}


class Exchange(torch.autograd.Function):
    """Part p of the first dimension goes to process p, and what comes from process p is part p."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts.contiguous())
        distributed.all_to_all_single(received, parts.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Exchange.apply(gradient)


def ulysses_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the whole sequence for some of the heads, without the mask and with the positions of all tokens."""
    num_processes = distributed.get_world_size()
    positions = options["position_ids"]
    gathered = [torch.empty_like(positions) for _ in range(num_processes)]
    distributed.all_gather(gathered, positions.contiguous())
    options["position_ids"] = torch.cat(gathered, 1)
    parts = []
    for states in (query, key, value):
        states = states.repeat_interleave(max(1, num_processes // states.shape[1]), 1)
        parts.append(torch.cat(tuple(Exchange.apply(torch.stack(states.chunk(num_processes, 1)))), 2))
    out, weights = efficient_attention_forward(module, *parts, None, **options)
    received = Exchange.apply(torch.stack(out.chunk(num_processes, 1)))
    return torch.cat(tuple(received), 2), weights


def replace_attention(model: Any) -> None:
    """Do what `UlyssesSPAttentionHF.register_with_transformers` does, as far as models and our functions see it."""
    sys.modules[DEEPSPEED_GROUPS] = SimpleNamespace(  # type: ignore[assignment]
        _SEQUENCE_PARALLEL_GROUP=distributed.group.WORLD,
        get_sequence_parallel_rank=distributed.get_rank,
        get_sequence_parallel_world_size=distributed.get_world_size,
    )
    ALL_ATTENTION_FUNCTIONS["efficient"] = ulysses_attention


def replace_attention_by_deepspeed(model: Any) -> None:
    """Let DeepSpeed do it, for one model after another."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp, ulysses_sp

    if "efficient" in ALL_ATTENTION_FUNCTIONS._local_mapping:
        del ALL_ATTENTION_FUNCTIONS["efficient"]
    parallel_state_sp._release_sequence_parallel_groups()
    ulysses_sp.UlyssesSPAttentionHF.register_with_transformers(
        model, "efficient", sequence_parallel_size=distributed.get_world_size(), micro_batch_size=ROWS
    )


def together(model: Any) -> dict[str, Tensor]:
    """Return the results of all processes."""
    rank, num_processes = distributed.get_rank(), distributed.get_world_size()
    part = {name: each.chunk(num_processes, 1)[rank] for name, each in batch(model.config.vocab_size).items()}
    found = results(model, part)
    logits = [torch.empty_like(found["logits"]) for _ in range(num_processes)]
    distributed.all_gather(logits, found.pop("logits"))
    for gradient in found.values():
        distributed.all_reduce(gradient)
    return {"logits": torch.cat(logits, 1), **found}


def said(model: Any) -> dict[str, str]:
    """Return what is said of what a process cannot see."""
    inputs = {name: each.chunk(distributed.get_world_size(), 1)[0] for name, each in batch(64).items()}
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 0] = 0
    raised = {"padding": raised_by(lambda: model(**inputs, attention_mask=mask))}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model(inputs["input_ids"], use_cache=False)
    raised["positions"] = " ".join(str(each.message) for each in warned)
    # another library, which tells nobody how it deals out the heads
    groups = sys.modules.pop(DEEPSPEED_GROUPS)
    raised["heads"] = raised_by(lambda: model(**inputs))
    sys.modules[DEEPSPEED_GROUPS] = groups
    return raised


def raised_by(action: Callable[[], Any]) -> str:
    try:
        action()
    except hea.EfficientAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(folder: Path, *options: str) -> None:
    """Compute the results of every model in the folder, and what is said of the one called "per_head"."""
    torch.set_num_threads(1)
    if options:
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        distributed.init_process_group("gloo")
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="efficient").double()
        (replace_attention_by_deepspeed if options else replace_attention)(model)
        found: dict[str, Any] = together(model)
        if path.name == "per_head":
            found["said"] = said(model)
        if distributed.get_rank() == 0:
            torch.save(found, folder / f"{path.name}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
