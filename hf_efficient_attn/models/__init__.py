"""Model families, one folder each, which holds its config and its classes; `register` tells the Auto classes of them.

`hf_efficient_attn` has all of them by name, too.
"""
