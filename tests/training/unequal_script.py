"""Train one step in each of several processes whose configs differ, or do not; print what was raised.

torchrun --nproc_per_node 2 unequal_script.py
"""

import time
import warnings
from typing import Any

import torch
import transformers
from torch import distributed

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

TINY = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IDS = torch.arange(3, 15)[None]


def sparse_llama(left: int) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TINY))
    return hea.sparsify(model, Band(left, 0))


def spans(limit: int) -> Any:
    return hea.AdaptiveSpanForCausalLM(hea.AdaptiveSpanConfig.modern(**TINY, span_limit=limit, span_ramp=2))


def blocks(name: str) -> Any:
    return hea.SimplifiedTransformerForCausalLM(hea.SimplifiedTransformerConfig(**TINY, block=name))


def encoder_decoder(window: int) -> Any:
    sizes = {name: value for name, value in TINY.items() if name != "num_hidden_layers"}
    config = hea.SparseSeq2SeqConfig.led(**sizes, encoder_layers=2, decoder_layers=2, attention_window=window)
    return hea.SparseSeq2SeqForConditionalGeneration(config)


def step(model: Any) -> str:
    """Return what the first step of training raised; the last rank comes later than the others."""
    distributed.barrier()
    if distributed.get_rank() == distributed.get_world_size() - 1:
        time.sleep(0.3)
    try:
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
    except hea.ConfigurationError as error:
        return str(error)
    return "nothing"


def main() -> None:
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    cases = {
        "equal": lambda: sparse_llama(4),
        "again": lambda: sparse_llama(4),
        "pattern": lambda: sparse_llama(4 + rank),
        "spans": lambda: spans(8 + rank),
        "block": lambda: blocks(("sas", "sas_p")[rank]),
        "encoder": lambda: encoder_decoder(4 + 2 * rank),
        "equal spans": lambda: spans(8),
    }
    raised = {name: step(build()) for name, build in cases.items()}
    # evaluation and generation on one process alone
    if rank == 0:
        raised["alone"] = step_alone(sparse_llama(9))
    distributed.barrier()
    for name, message in raised.items():
        print(f"{rank}|{name}|{message}", flush=True)
    distributed.destroy_process_group()


def step_alone(model: Any) -> str:
    model.eval().generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, do_sample=False)
    return "nothing"


if __name__ == "__main__":
    main()
