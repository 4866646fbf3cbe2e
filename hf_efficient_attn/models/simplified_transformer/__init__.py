"""Simplified Transformer blocks (He & Hofmann, arXiv:2311.01906)."""

from .configuration_simplified_transformer import *
from .modeling_simplified_transformer import *
