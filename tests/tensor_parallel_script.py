"""Load saved models with their attention cut over the processes of torchrun, and save what each computes.

    torchrun --nproc_per_node 2 tensor_parallel_script.py FOLDER

Reads FOLDER/{name}/ and writes FOLDER/{name}.pt from the first process: logits, and the gradient of the embeddings.
"""

import os
import sys
from pathlib import Path

import torch
import transformers
from transformers.distributed import DistributedConfig

import hf_efficient_attn as hea
from hf_efficient_attn.attention import model_heads

RANK = int(os.environ.get("RANK", "0"))


def results(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the logits of two texts, one of them padded, and the gradient of the embeddings."""
    input_ids = torch.arange(2 * 24).reshape(2, 24) % model.config.vocab_size
    mask = torch.ones_like(input_ids)
    mask[1, 17:] = 0
    if model.config.is_encoder_decoder:
        logits = model(input_ids=input_ids, attention_mask=mask, decoder_input_ids=input_ids[:, :9]).logits
    else:
        logits = model(input_ids=input_ids, attention_mask=mask).logits * mask[..., None]
    logits.square().mean().backward()
    gradient = model.get_input_embeddings().weight.grad
    assert gradient is not None
    return {"logits": logits.detach(), "gradient": getattr(gradient, "full_tensor", lambda: gradient)()}


def main(folder: Path) -> None:
    """Compute the results of every model in the folder."""
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        is_pair = transformers.AutoConfig.from_pretrained(path).is_encoder_decoder
        auto_class = transformers.AutoModelForSeq2SeqLM if is_pair else transformers.AutoModelForCausalLM
        model = auto_class.from_pretrained(
            path, attn_implementation="efficient", distributed_config=DistributedConfig(tp_size=2)
        )
        found = results(model)
        if path.name == "llama":
            # heads whose numbers cannot be known
            model_heads.shards_of = lambda module: []
            try:
                results(model)
            except hea.UnsupportedBackendError as error:
                found["refused"] = torch.tensor(list(str(error).encode()))
        if RANK == 0:
            torch.save(found, folder / f"{path.name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
