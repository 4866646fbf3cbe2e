"""What a backend is asked before it is chosen: everything about a call but the values of its tensors."""

from dataclasses import dataclass

import torch

from hf_efficient_attn.layout.layout import Layout


@dataclass(frozen=True)
class Request:
    """One call of attention, described.

    Attributes:
        device: type of the device, such as "cpu" or "cuda".
        head_dim, value_dim: width of a query and key, and of a value.
        needs_grad: gradients will be asked for.
        is_compiling: the call is being traced by `torch.compile` or `torch.export`.
        dropout: probability with which a weight is dropped.
        has_terms: the scores have learned terms.
        has_token_mask: examples differ by padding, documents or chosen global tokens.
        has_query_start: the position of the first query is a tensor, whose value is unknown while compiling.
    """

    layout: Layout
    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    num_key_heads: int
    batch_size: int
    needs_grad: bool = False
    is_compiling: bool = False
    dropout: float = 0.0
    has_terms: bool = False
    has_token_mask: bool = False
    has_query_start: bool = False
