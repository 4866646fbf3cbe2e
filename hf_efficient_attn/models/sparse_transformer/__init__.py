"""The sparse Transformer family: Longformer, BigBird and every other pattern, bidirectional and causal."""

from .configuration_sparse_transformer import *
from .modeling_sparse_transformer import *
