"""The Reformer family: attention within hash buckets, reversible layers, axial positions."""

from .configuration_efficient_reformer import *
from .modeling_efficient_reformer import *
