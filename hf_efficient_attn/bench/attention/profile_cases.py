"""The calls whose time `bench attention --profile` takes apart, and what each should reach."""

from dataclasses import dataclass

import torch

from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.bench.attention.cases import Call
from hf_efficient_attn.bench.harness.timing import Case

COMPILED_TARGET, EFFICIENCY_TARGET = 0.75, 0.55
SPEED_TARGET, TIME_TARGET, GROWTH_TARGET = 0.95, 1.15, 2.1


@dataclass(frozen=True)
class ProfileCase:
    """A call whose time is taken apart.

    Attributes:
        figure: what has a target: "efficiency"; "speed" against dense attention; "time" against the case before;
            "growth" per doubling.
        aligned: a pattern of whole blocks with about as many pairs, by which a kernel that evaluates masks is
            measured without them; None: the kernel is timed alone.
    """

    pattern: str
    tokens: int
    backend: str = "auto"
    measure: str = "forward"
    figure: str = "efficiency"
    target: float = EFFICIENCY_TARGET
    aligned: str | None = None


CASES = (
    *(
        ProfileCase("band", tokens, flex.NAME, target=COMPILED_TARGET, aligned="blocks(band(4, 4), 64)")
        for tokens in (4096, 32768)
    ),
    *(ProfileCase("bigbird", tokens) for tokens in (4096, 16384)),
    *(ProfileCase(name, 4096, figure="time", target=TIME_TARGET) for name in ("band", "dilated")),
    *(
        ProfileCase(name, tokens, figure="speed", target=SPEED_TARGET)
        for name, tokens in (("band", 128), ("band", 512), ("dilated", 128))
    ),
    *(
        ProfileCase("band", tokens, measure="forward_backward", figure="growth", target=GROWTH_TARGET)
        for tokens in (65536, 131072)
    ),
)


def as_case(call: Call, measure: str) -> Case:
    """Return the case of a forward pass, or of forward and backward."""
    if measure == "forward":
        return call.forward_case()
    return call.forward_backward_case(torch.ones_like(call.inputs[0]))
