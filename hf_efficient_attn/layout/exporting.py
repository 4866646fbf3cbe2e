"""Whether a model is being exported, in any version of torch."""

import torch

# by its name: what names the module is compiled by itself where a compiler has given up the code around it
from torch.compiler import is_exporting as exports


# asked by traced code, torch 2.11 says yes whatever it compiles for
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_exporting() -> bool:
    """Return whether `torch.export` traces a model, and not `torch.compile`."""
    return exports()
