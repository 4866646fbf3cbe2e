"""The compressed Transformer family: tokens attend to a short form, or to sums, of the keys and values."""

from .configuration_compressed_transformer import *
from .modeling_compressed_transformer import *
