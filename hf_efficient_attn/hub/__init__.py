"""What a saved model brings along, so that it can be loaded where this package is not imported, or not installed."""

from hf_efficient_attn.hub.copies import include_code

__all__ = ["include_code"]
