"""Train one step in each of three processes, of which the last differs, or none; write what was raised.

    torchrun --nproc_per_node 3 unequal_script.py FOLDER

Ends with an error, since at last `Trainer` trains different models. FOLDER: gets a file RANK.json of each process, with
what was raised by name of the case, and what Trainer writes.
"""

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from models_cases import trainer_arguments
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

TINY = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IDS = torch.arange(3, 15)[None]


def sparse_llama(left: int) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TINY))
    return hea.sparsify(model, Band(left, 0))


def spans(limit: int) -> Any:
    return hea.AdaptiveSpanForCausalLM(hea.AdaptiveSpanConfig.modern(**TINY, span_limit=limit, span_ramp=2))


def step(model: Any) -> str:
    """Return what two steps of training raised; None: this process does not train.

    The last rank starts later, which makes it the one that differs from the first, unless FSDP lets all go on at once.
    """
    distributed.barrier()
    if distributed.get_rank() == distributed.get_world_size() - 1:
        time.sleep(0.3)
    raised = "nothing" if model is None else forward(model.train())
    everywhere = [raised] * distributed.get_world_size()
    distributed.all_gather_object(everywhere, raised)
    # backward, processes that compute together would wait for the one that has raised, until a launcher ends them
    if model is not None and {*everywhere} == {"nothing"}:
        for _ in range(2):
            model(input_ids=IDS, labels=IDS).loss.backward()
    return raised


def forward(model: Any) -> str:
    try:
        model(input_ids=IDS, labels=IDS)
    except hea.ConfigurationError as error:
        return str(error)
    return "nothing"


def in_ddp(model: Any) -> Any:
    return DistributedDataParallel(model)


def in_fsdp(model: Any) -> Any:
    return fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))


def step_after_reference(model: Any) -> str:
    """Return what training raised in processes of which the first has trained a dense model alone before."""
    if distributed.get_rank() == 0:
        forward(sparse_llama(IDS.shape[1]).train())
    return step(model)


def step_alone(model: Any) -> str:
    model.eval().generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, do_sample=False)
    return "nothing"


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    is_last = int(rank == 2)
    cases = {
        "equal": lambda: sparse_llama(4),
        "pattern": lambda: sparse_llama(4 + is_last),
        "spans": lambda: spans(8 + is_last),
        "equal under DDP": lambda: in_ddp(sparse_llama(4)),
        "DDP": lambda: in_ddp(sparse_llama(4 + is_last)),
        "equal under FSDP": lambda: in_fsdp(sparse_llama(4)),
        "FSDP": lambda: in_fsdp(sparse_llama(4 + is_last)),
    }
    raised = {name: step(build()) for name, build in cases.items()}
    # evaluation and generation on one process alone; another that trains nothing
    if rank == 0:
        raised["alone"] = step_alone(sparse_llama(9))
    raised["idle"] = step(None if rank == 1 else sparse_llama(4 + is_last))
    raised["DDP after a reference"] = step_after_reference(in_ddp(sparse_llama(4)))
    Path(folder, f"{rank}.json").write_text(json.dumps(raised))
    distributed.barrier()
    train(sparse_llama(4 + is_last), folder)


def train(model: Any, folder: str) -> None:
    arguments = trainer_arguments(folder, max_steps=1, ddp_backend="gloo")
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 24
    transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()


if __name__ == "__main__":
    main(sys.argv[1])
