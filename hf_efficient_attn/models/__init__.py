"""Model families, one folder each with its config and its models; `register` adds them to the Auto classes.

`hf_efficient_attn` exports all of them by name.
"""
