"""What senders and users of a shared model compare. Imports stand in the functions: some users lack the package."""

import copy
import hashlib
from typing import Any

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


def scatter(model: Any) -> Any:
    """Move every weight and fixed W_init away from where initialisation puts it, so that none can be lost unseen."""
    import torch

    torch.manual_seed(0)
    fixed = [buffer for name, buffer in model.named_buffers() if name.endswith("initial_weight")]
    with torch.no_grad():
        for tensor in [*model.parameters(), *fixed]:
            tensor.add_(0.1 * torch.randn_like(tensor))
    return model


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
