"""The Routing Transformer: some heads attend to the tokens of their cluster, the others follow a pattern."""

from .configuration_routing_transformer import *
from .modeling_routing_transformer import *
