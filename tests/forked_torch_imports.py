"""What scripts import of which huggingface_hub shall be imported anew, or another copy of the package.

It knows no variable of a Hub or a cache, which huggingface_hub, transformers, datasets and evaluate read as they are
imported; it takes two thirds of the time that importing all of them takes.
"""

import sys

import pandas  # noqa: F401
import pyarrow  # noqa: F401
import scipy.stats  # noqa: F401
import sklearn.metrics  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.optim  # noqa: F401

assert "huggingface_hub" not in sys.modules

# a process that has computed with several threads cannot be forked
torch.set_num_threads(1)
