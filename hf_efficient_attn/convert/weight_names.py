"""Names of the weights in the files of a checkpoint; no weight is read."""

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from hf_efficient_attn.convert.hub import why_not_from_hub
from hf_efficient_attn.convert.reading import reading
from hf_efficient_attn.errors import CheckpointError

# in the order in which transformers looks for them
WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
# buffers that earlier versions of transformers, or fairseq, saved beside the weights, and that models now make anew
OLD_BUFFER = re.compile(r"(^|\.)(position_ids|token_type_ids|(encoder|decoder)\.version|(\w+_)?inv_freq)$")
# how TensorFlow calls gains and biases of norms, which the first checkpoints kept
OF_TENSORFLOW = {"gamma": "weight", "beta": "bias"}


def weight_names(path: str) -> list[str]:
    """Return the names of the weights of a checkpoint, a folder or a name on the Hub.

    Raises:
        CheckpointError: no file with weights, or one that is damaged.
    """
    readers = dict(zip(WEIGHT_FILES, (_in_safetensors, _in_index, _in_pickle, _in_index), strict=True))
    for name, read in readers.items():
        try:
            file = cached_file(path, name)
        except OSError as error:
            answer = why_not_from_hub(path, error)
            if answer is not None:
                raise CheckpointError(answer) from error
            continue
        with reading(path, f"The file {name} of {path}", "Copy or download the checkpoint again."):
            return [_as_today(each) for each in read(Path(str(file)))]
    raise CheckpointError(f"The weights of {path} cannot be read: it has none of the files {', '.join(readers)}.")


def is_old_buffer(name: str) -> bool:
    """Return whether a name is that of a buffer that earlier versions saved, which is no weight.

    >>> is_old_buffer("longformer.embeddings.position_ids"), is_old_buffer("embeddings.position_embeddings.weight")
    (True, False)
    """
    return OLD_BUFFER.search(name) is not None


def _in_safetensors(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as weights:
        return list(weights.keys())


def _in_index(file: Path) -> list[str]:
    return list(json.loads(file.read_text(encoding="utf-8"))["weight_map"])


def _in_pickle(file: Path) -> list[str]:
    return list(torch.load(file, map_location="meta", weights_only=True))


def _as_today(name: str) -> str:
    module, _, parameter = name.rpartition(".")
    return f"{module}.{OF_TENSORFLOW[parameter]}" if parameter in OF_TENSORFLOW else name
