"""The authors' networks have the sizes of their code, and as many parameters as their docstrings say."""

import re

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.models.routing_transformer import configuration_routing_transformer

# of the authors' code: n, layers, hidden, filter, local + routing heads, clusters, tokens of a cluster
AUTHORS = {
    "wikitext103": (4096, 14, 1024, 3072, 8, 8, 8, 512),
    "wikitext103_short": (1024, 20, 1024, 3072, 8, 8, 2, 512),
    "enwik8": (8192, 12, 1024, 3072, 4, 4, 16, 512),
    "enwik8_long": (12_288, 12, 1024, 3072, 4, 4, 48, 256),
    "pg19": (8192, 22, 1032, 4096, 6, 2, 16, 512),
    "imagenet64": (12_288, 24, 1024, 2048, 12, 4, 8, 2048),
    "cifar10": (3072, 12, 1024, 2048, 4, 4, 6, 512),
}


@pytest.mark.parametrize("name", AUTHORS)
def test_sizes_and_parameters(name: str) -> None:
    config = getattr(hea.RoutingTransformerConfig, name)()
    last = config.num_hidden_layers - 1
    routing = config.routing_heads(last)
    shape = (config.max_position_embeddings, config.num_hidden_layers, config.hidden_size, config.intermediate_size)
    heads = (config.num_attention_heads - routing, routing, config.num_clusters, config.cluster_tokens)
    assert (*shape, *heads) == AUTHORS[name]
    assert config.routing_heads(0) == (0 if name == "pg19" else routing)
    with torch.device("meta"):
        model = hea.RoutingTransformerForCausalLM(config)
    found = sum(parameter.numel() for parameter in model.parameters())
    said = re.search(r"([\d,]{9,}) parameters", getattr(configuration_routing_transformer, name).__doc__ or "")
    assert said is not None
    assert found == int(said[1].replace(",", "")) == counted(config)


def counted(config: hea.RoutingTransformerConfig) -> int:
    """Return the number of parameters by the sizes, without building a model."""
    width, layers = config.hidden_size, config.num_hidden_layers
    total = config.vocab_size * width
    for layer in range(layers):
        routing, dim = config.routing_heads(layer), config.head_dim
        maps = 3 * width * width + width * (config.num_attention_heads - routing) * dim + dim * dim
        tables = (1 + bool(routing)) * (config.max_relative_distance + 1) * dim
        total += maps + tables + 3 * width * config.intermediate_size + 4 * width
    return total
