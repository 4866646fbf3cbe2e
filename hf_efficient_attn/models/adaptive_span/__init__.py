"""The adaptive span family: heads that learn how far they attend."""

from .configuration_adaptive_span import *
from .modeling_adaptive_span import *
