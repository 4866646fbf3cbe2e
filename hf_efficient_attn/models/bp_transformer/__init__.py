"""The BP-Transformer family: tokens attend to near tokens one by one, and to far ones as spans of a binary tree."""

from .configuration_bp_transformer import *
from .modeling_bp_transformer import *
