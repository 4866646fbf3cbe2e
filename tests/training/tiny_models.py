"""Tiny language models for tests of training."""

from typing import Any

import hf_efficient_attn as hea


def two_blocks(block: str, **fields: Any) -> hea.SimplifiedTransformerForCausalLM:
    """Return a model of two blocks of a kind, for 64 tokens."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hea.SimplifiedTransformerConfig(block=block, vocab_size=64, **sizes, **fields)
    return hea.SimplifiedTransformerForCausalLM(config)


def one_block(vocab_size: int) -> hea.SimplifiedTransformerForCausalLM:
    """Return a model of one plain block."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hea.SimplifiedTransformerConfig(block="pre_ln", vocab_size=vocab_size, **sizes)
    return hea.SimplifiedTransformerForCausalLM(config)
