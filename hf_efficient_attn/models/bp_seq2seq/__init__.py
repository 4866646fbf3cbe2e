"""The BP-Transformer that translates: an encoder over the tree of the source, a decoder over that of the target."""

from .configuration_bp_seq2seq import *
from .modeling_bp_seq2seq import *
