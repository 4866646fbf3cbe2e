"""Load saved models with their attention cut over the processes of torchrun, and save what each computes.

    torchrun --nproc_per_node 2 tensor_parallel_script.py FOLDER

Reads FOLDER/{name}/ and writes FOLDER/{name}.pt from the first process: logits, the loss that layers add in training,
and the gradients of all parameters, and these after three steps.
"""

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from shared_meshes import share_meshes
from transformers.distributed import DistributedConfig

import hf_efficient_attn as hea
from hf_efficient_attn.integration import model_info

STEPS = 3
# before the names of parameters after these steps
TRAINED = "trained "
# models in training, whose layers add a loss to the task's; the others are in evaluation, where there is no dropout
IN_TRAINING = ("index-warmup", "index-sparse", "span-dynamic", "routing-causal")
RANK = int(os.environ.get("RANK", "0"))


def results(model: transformers.PreTrainedModel, is_training: bool = False) -> dict[str, torch.Tensor]:
    """Return the logits of two texts, one of them padded, the gradients of all parameters, and trained parameters.

    In training, the loss of the layers is added to the result, and to what is differentiated.
    """
    logits, auxiliary_loss = outputs_of(model.train(is_training))
    (logits.square().mean() + auxiliary_loss).backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    found = {"logits": logits.detach(), **{name: whole(gradient) for name, gradient in gradients.items()}}
    if is_training:
        found["auxiliary_loss"] = auxiliary_loss.detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.step()
        optimizer.zero_grad()
        logits, auxiliary_loss = outputs_of(model)
        (logits.square().mean() + auxiliary_loss).backward()
    model.zero_grad()
    return {**found, **{f"{TRAINED}{name}": whole(each.detach()) for name, each in model.state_dict().items()}}


def outputs_of(model: transformers.PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of two texts, and the loss that layers add in training, otherwise 0."""
    input_ids = torch.arange(2 * 24).reshape(2, 24) % model.config.vocab_size
    mask = torch.ones_like(input_ids)
    mask[1, 17:] = 0
    if model.config.is_encoder_decoder:
        logits = model(input_ids=input_ids, attention_mask=mask, decoder_input_ids=input_ids[:, :9]).logits
        return logits, logits.new_zeros(())
    outputs = model(input_ids=input_ids, attention_mask=mask)
    own = outputs.auxiliary_loss if model.training else outputs.logits.new_zeros(())
    return outputs.logits * mask[..., None], own


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "full_tensor", lambda: tensor)().clone()


def auto_class_of(config: transformers.PreTrainedConfig) -> Any:
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    is_encoder = getattr(config, "is_causal", True) is False
    return transformers.AutoModelForMaskedLM if is_encoder else transformers.AutoModelForCausalLM


def main(folder: Path) -> None:
    """Compute the results of every model in the folder."""
    share_meshes()
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        config = transformers.AutoConfig.from_pretrained(path)
        is_changed = any(getattr(config, name, None) is not None for name in ("attention_pattern", "attention_indexer"))
        implementation = "efficient" if is_changed else None
        model = auto_class_of(config).from_pretrained(
            path, attn_implementation=implementation, distributed_config=DistributedConfig(tp_size=2)
        )
        found = results(model, path.name in IN_TRAINING)
        if path.name == "llama":
            # heads whose numbers cannot be known
            with patch.object(model_info, "head_shards", lambda module: []):
                try:
                    results(model)
                except hea.UnsupportedBackendError as error:
                    found["refused"] = torch.tensor(list(str(error).encode()))
        if RANK == 0:
            torch.save(found, folder / f"{path.name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
