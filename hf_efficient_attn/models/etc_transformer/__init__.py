"""The ETC family: long tokens that read a band, and global tokens that stand for its sentences and read everything."""

from .configuration_etc_transformer import *
from .modeling_etc_transformer import *
from .structured_text import *
