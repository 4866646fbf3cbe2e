"""The BP-Transformer for translation: an encoder over the tree of the source, a decoder over the tree of the target."""

from .configuration_bp_seq2seq import *
from .modeling_bp_seq2seq import *
