"""Tiny language models for tests of training."""

from typing import Any

import torch
import transformers

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, Dilated, GlobalTokens, PerHead


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


def sparse_llama(seed: int = 0, **fields: Any) -> transformers.LlamaForCausalLM:
    """Return a Llama whose eight heads share four key heads and follow two patterns, random by the seed."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = transformers.LlamaConfig(
        **{"vocab_size": 64, "num_key_value_heads": 4, "pad_token_id": 0, **sizes, **fields}
    )
    pattern = PerHead([Band(3, 0), Dilated(12, 0, 3) | GlobalTokens([0])])
    return hea.sparsify(transformers.LlamaForCausalLM(config), pattern)
