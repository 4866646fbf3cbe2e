"""The sparse encoder-decoder family: LED, BigBird-Pegasus, the Transformer of 2017, and other encoder patterns."""

from .configuration_sparse_seq2seq import *
from .modeling_sparse_seq2seq import *
