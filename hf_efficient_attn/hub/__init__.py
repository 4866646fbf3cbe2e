"""What is saved with a model: its model card, and code for programs that do not import or do not have this package."""

from hf_efficient_attn.hub.card import model_card
from hf_efficient_attn.hub.copies import include_code

__all__ = ["include_code", "model_card"]
