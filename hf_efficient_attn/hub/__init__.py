"""What a saved model brings along: code for where this package is not imported or not installed, and its model card."""

from hf_efficient_attn.hub.card import model_card
from hf_efficient_attn.hub.copies import include_code

__all__ = ["include_code", "model_card"]
