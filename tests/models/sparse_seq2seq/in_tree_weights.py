"""Weights of transformers' encoder-decoders under the names of ours, for parity tests."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import hf_efficient_attn as hea

# in order: later rules see what earlier ones have written
COMMON = {
    "shared": "embed_tokens",
    "embed_positions.weight": "embeddings.positions.table.weight",
    "self_attn_layer_norm": "attention_norm",
    "encoder_attn_layer_norm": "cross_norm",
    "final_layer_norm": "mlp_norm",
    "encoder_attn": "cross_attn",
    "out_proj": "o_proj",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
}
MARIAN: dict[str, str] = {}
LED = {
    "led.": "model.",
    "longformer_self_attn.query_global": "global_attention.q_proj",
    "longformer_self_attn.key_global": "global_attention.k_proj",
    "longformer_self_attn.value_global": "global_attention.v_proj",
    "longformer_self_attn.query": "q_proj",
    "longformer_self_attn.key": "k_proj",
    "longformer_self_attn.value": "v_proj",
    "self_attn.output": "self_attn.o_proj",
    "layernorm_embedding": "embeddings.norm",
    "classification_head.dense": "classifier.dense",
    "classification_head.out_proj": "classifier.out_proj",
    "classification_head.o_proj": "classifier.out_proj",
}
BIGBIRD_PEGASUS = {
    "self_attn.self.query": "self_attn.q_proj",
    "self_attn.self.key": "self_attn.k_proj",
    "self_attn.self.value": "self_attn.v_proj",
    "self_attn.output": "self_attn.o_proj",
    "layernorm_embedding": "norm",
}


def copy_in_tree(source: nn.Module, target: nn.Module, rules: Mapping[str, str]) -> None:
    """Load the weights of a transformers model; every weight of ours must get one."""
    renamed: dict[str, Tensor] = {}
    for name, weight in source.state_dict().items():
        if name.endswith("coder.embed_tokens.weight"):
            continue
        if name == "final_logits_bias":
            renamed["lm_head.bias"] = weight[0]
            continue
        for old, new in {**COMMON, **rules}.items():
            name = name.replace(old, new)
        renamed[name] = weight
    if "lm_head.bias" in target.state_dict():
        renamed.setdefault("lm_head.bias", torch.zeros(target.config.vocab_size))
    unused = {"encoder.embeddings.positions.table.weight", "decoder.embeddings.positions.table.weight"}
    missing, unexpected = target.load_state_dict(renamed, strict=False)
    assert not missing
    assert {name.removeprefix("model.") for name in unexpected} <= unused


def randomize_all(model: nn.Module) -> nn.Module:
    """Move every parameter, and the bias of the logits, which transformers keeps as a buffer of zeros."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.1)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.add_(torch.randn(model.final_logits_bias.shape, generator=generator))
    return model


def torch_transformer(model: "hea.SparseSeq2SeqModel") -> nn.Transformer:
    """Return `torch.nn.Transformer` with the weights of a post-norm model, without its final norms."""
    config = model.config
    theirs = nn.Transformer(
        config.hidden_size,
        config.num_attention_heads,
        config.encoder_layers,
        config.decoder_layers,
        config.intermediate_size,
        dropout=0.0,
        activation=config.hidden_act,
        layer_norm_eps=config.norm_eps,
        batch_first=True,
        norm_first=False,
    )
    theirs.encoder.norm = theirs.decoder.norm = None
    theirs.encoder.use_nested_tensor = False
    theirs = theirs.to(model.dtype).eval()
    for ours, layer in zip(model.encoder.layers, theirs.encoder.layers, strict=True):
        _copy_attention(ours.self_attn, layer.self_attn)
        _copy_rest(ours, layer, (ours.attention_norm, ours.mlp_norm))
    for ours, layer in zip(model.decoder.layers, theirs.decoder.layers, strict=True):
        _copy_attention(ours.self_attn, layer.self_attn)
        _copy_attention(ours.cross_attn, layer.multihead_attn)
        _copy_rest(ours, layer, (ours.attention_norm, ours.cross_norm, ours.mlp_norm))
    return theirs


def _copy_attention(ours: nn.Module, theirs: nn.MultiheadAttention) -> None:
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
        theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
    theirs.out_proj.load_state_dict(ours.o_proj.state_dict())


def _copy_rest(ours: nn.Module, theirs: nn.Module, norms: tuple[nn.Module, ...]) -> None:
    theirs.linear1.load_state_dict(ours.mlp.up_proj.state_dict())
    theirs.linear2.load_state_dict(ours.mlp.down_proj.state_dict())
    for number, norm in enumerate(norms, 1):
        getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())
