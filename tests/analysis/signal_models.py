"""Tiny models and tokens of which signal propagation is measured."""

import torch
from transformers import AutoModel, BertConfig, GPT2Config

from hf_efficient_attn import SimplifiedTransformerConfig

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "position_embedding_type": "learned",
}
GPT2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
BERT = BertConfig(**{name: SHAPE[name] for name in SHAPE if name != "position_embedding_type"})


def build(config):
    return AutoModel.from_config(config).eval()


def simplified(**fields):
    return build(SimplifiedTransformerConfig(**{**SHAPE, **fields}))


def tokens(batch=2, length=16):
    return torch.randint(SHAPE["vocab_size"], (batch, length))


def cosines(report):
    return [layer.token_cosine for layer in report.layers]
