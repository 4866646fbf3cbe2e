"""The Star-Transformer family: tokens that attend to their neighbours and to a relay that all of them share."""

from .configuration_star_transformer import *
from .modeling_star_transformer import *
