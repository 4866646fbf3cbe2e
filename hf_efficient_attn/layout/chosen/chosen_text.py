"""What a choice of keys is besides its tensors, as JSON: an operator takes only tensors, numbers and text."""

import json

from torch import Tensor

from hf_efficient_attn.layout.call_text import to_text
from hf_efficient_attn.layout.chosen.chosen_keys import ChosenKeys
from hf_efficient_attn.layout.chosen.grouped_keys import ChunkedOrder, KeyGroups
from hf_efficient_attn.layout.chosen.listed_keys import ChosenBlocks, ChosenTokens

KINDS: dict[str, type[ChosenKeys]] = {each.kind: each for each in (ChosenBlocks, ChosenTokens, ChunkedOrder, KeyGroups)}


def write_chosen_text(chosen: ChosenKeys) -> str:
    """Return the kind and the numbers of a choice as JSON text, in code that torch can trace.

    >>> import torch
    >>> write_chosen_text(ChosenBlocks(torch.zeros(1, 1, 4, 2), 16))
    '{"kind": "blocks", "numbers": [16, 1, "document"]}'
    """
    # the text of a float is that of its JSON
    numbers = [str(each) if isinstance(each, float) else to_text(each) for each in chosen.numbers]
    return "{" + f'"kind": "{chosen.kind}", "numbers": [{", ".join(numbers)}]' + "}"


def read_chosen(text: str, tensors: list[Tensor | None]) -> ChosenKeys:
    """Return the choice of this text and these tensors."""
    data = json.loads(text)
    kind = KINDS[data["kind"]]
    named = zip(kind.tensor_names + kind.number_names, [*tensors, *data["numbers"]], strict=True)
    return kind(**dict(named))
