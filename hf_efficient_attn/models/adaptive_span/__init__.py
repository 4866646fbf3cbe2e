"""The adaptive span family: heads that learn how far they read."""

from .configuration_adaptive_span import *
from .modeling_adaptive_span import *
