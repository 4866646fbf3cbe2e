"""The Routing Transformer: heads that read the tokens of their cluster, beside heads that follow a pattern."""

from .configuration_routing_transformer import *
from .modeling_routing_transformer import *
