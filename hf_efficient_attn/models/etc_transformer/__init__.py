"""The ETC family: long tokens attend to a band and to global tokens, which stand for parts and attend to everything."""

from hf_efficient_attn.models.etc_transformer.structured_inputs import *

from .configuration_etc_transformer import *
from .modeling_etc_transformer import *
