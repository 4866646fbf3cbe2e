"""Train a model on texts that two processes share, of which one is killed or stopped in the middle of a step.

    torchrun --nproc_per_node 2 sharded_death_script.py FOLDER forward|backward|stopped

The process that is left writes FOLDER/{how}.json: what it raised.
"""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

# of the step in which a process is lost; those before may take their time
TIMEOUT = timedelta(seconds=5)
SIZES = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}


def end_this_process(how: str) -> None:
    """End this process as a machine that is lost would, or as one that hangs."""
    os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)


def end_in_second_layer(model: Any, how: str) -> None:
    """Let this process end when its second layer has been computed, or its gradient."""
    layer = model.model.layers[1]
    if how == "backward":
        layer.register_full_backward_hook(lambda *_: end_this_process(how))
    else:
        layer.register_forward_hook(lambda *_: end_this_process(how))


def main(folder: Path, how: str) -> None:
    """Make a step that both finish, and one that neither does."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    config = transformers.LlamaConfig(**SIZES)
    model = hea.sparsify(transformers.LlamaForCausalLM(config), Band(6, 0))
    hea.shard_sequence(model, init_device_mesh("cpu", (2,)))
    ids = torch.arange(32)[None]
    model(ids, labels=ids, use_cache=False).loss.backward()
    distributed.barrier()
    distributed.distributed_c10d._set_pg_timeout(TIMEOUT)
    if distributed.get_rank() == 1:
        end_in_second_layer(model, how)
    try:
        model(ids, labels=ids, use_cache=False).loss.backward()
        raised = "nothing"
    except RuntimeError as error:
        raised = f"{type(error).__name__}: {error}"
    (folder / f"{how}.json").write_text(json.dumps({"raised": raised}))
    # what is left of the group would wait for the other process
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
