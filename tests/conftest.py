"""Shared by all tests: one thread per process, since tiny models on many threads mostly wait for each other."""

import torch

torch.set_num_threads(1)
