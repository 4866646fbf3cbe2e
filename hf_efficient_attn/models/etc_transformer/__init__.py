"""The ETC family: long tokens that read a band, and global tokens that stand for its sentences and read everything."""

from hf_efficient_attn.models.etc_transformer.structured_inputs import *

from .configuration_etc_transformer import *
from .modeling_etc_transformer import *
