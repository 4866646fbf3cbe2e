"""The star of fastNLP, by the authors' lab: states and gradients, with equal weights.

One file of the package is read. What the package imports, in versions of 2022, need not be there.
"""

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_efficient_attn as hea

FILE = Path("modules", "torch", "encoder", "star_transformer.py")
TOKENS = 17


def their_star(config: Any) -> Any:
    found = find_spec("fastNLP")
    if found is None or found.origin is None:
        pytest.skip("fastNLP is not installed: pip install --no-deps FastNLP==1.0.1")
    spec = spec_from_file_location("star_of_fastnlp", Path(found.origin).parent / FILE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.head_dim)
    return module.StarTransformer(*sizes, dropout=0.0, max_len=config.max_position_embeddings)


def weight_pairs(ours: Any, theirs: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters of both that say the same; theirs of maps are those of convolutions."""
    modules = [(ours.embeddings.positions.table, theirs.pos_emb)]
    for number, layer in enumerate(ours.layers):
        modules.append((layer.attention_norm, theirs.norm[number]))
        for own, other in ((layer.self_attn, theirs.ring_att[number]), (layer.relay_attn, theirs.star_att[number])):
            names = {"q_proj": "WQ", "k_proj": "WK", "v_proj": "WV", "o_proj": "WO"}
            modules += [(getattr(own, name), getattr(other, letters)) for name, letters in names.items()]
    return [(parameter, getattr(other, name)) for own, other in modules for name, parameter in own.named_parameters()]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_network_of_fastnlp(dtype: torch.dtype, tolerance: float) -> None:
    config = hea.StarTransformerConfig.fastnlp(vocab_size=61, embedding_dropout=0.0)
    ours, theirs = hea.StarTransformerModel(config).to(dtype), their_star(config).to(dtype)
    torch.manual_seed(0)
    pairs = weight_pairs(ours, theirs)
    for own, other in pairs:
        nn.init.uniform_(own, 0.5, 1.0) if own.ndim == 1 else nn.init.normal_(own, std=0.05)
        with torch.no_grad():
            other.copy_(own.view(other.shape))
    embedded = torch.randn(3, TOKENS, config.hidden_size, dtype=dtype)
    found = ours(inputs_embeds=embedded)
    nodes, relay = theirs(embedded, torch.ones(3, TOKENS, dtype=torch.bool))
    options = {"atol": tolerance * nodes.abs().max().item(), "rtol": 0.0}
    torch.testing.assert_close(found.last_hidden_state, nodes, **options)
    torch.testing.assert_close(found.pooler_output, relay, **options)
    if dtype == torch.float32:
        return
    slopes = [
        torch.autograd.grad(states.sin().sum() + star.cos().sum(), parameters, materialize_grads=True)
        for states, star, parameters in (
            (found.last_hidden_state, found.pooler_output, [own for own, _ in pairs]),
            (nodes, relay, [other for _, other in pairs]),
        )
    ]
    for own, other in zip(*slopes, strict=True):
        torch.testing.assert_close(own, other.view(own.shape), atol=1e-9, rtol=1e-7)
