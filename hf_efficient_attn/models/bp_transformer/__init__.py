"""The BP-Transformer family: tokens that read near tokens one by one, and far ones as spans of a binary tree."""

from .configuration_bp_transformer import *
from .modeling_bp_transformer import *
