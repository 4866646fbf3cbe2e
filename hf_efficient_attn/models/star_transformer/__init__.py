"""The Star-Transformer family: tokens that read their neighbours, and a relay that all of them share."""

from .configuration_star_transformer import *
from .modeling_star_transformer import *
