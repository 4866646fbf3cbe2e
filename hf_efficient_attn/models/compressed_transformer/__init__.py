"""The compressed Transformer family: what is read is short, or a sum, and not who reads whom."""

from .configuration_compressed_transformer import *
from .modeling_compressed_transformer import *
