"""Whether a model is being exported, in any version of torch."""

import torch


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_exporting() -> bool:
    """Return whether `torch.export` traces a model, and not `torch.compile`."""
    # asked by traced code, torch 2.11 says yes whatever it compiles for
    return torch.compiler.is_exporting()
