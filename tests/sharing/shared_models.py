"""One tiny model of each family, and sparsified models of transformers, as their sender has them."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from sharing.hub_client import SIZES, scatter

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

SIDES = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}


def simplified() -> Any:
    return hea.SimplifiedTransformerForCausalLM(hea.SimplifiedTransformerConfig(**SIZES, block="sas_p"))


def sparse() -> Any:
    return hea.SparseTransformerForMaskedLM(hea.SparseTransformerConfig.longformer(**SIZES, attention_window=8))


def seq2seq() -> Any:
    sizes = {"vocab_size": 300, "hidden_size": 32, "encoder_layers": 1, "decoder_layers": 1, "num_attention_heads": 4}
    return hea.SparseSeq2SeqForConditionalGeneration(hea.SparseSeq2SeqConfig.led(**sizes, attention_window=8))


def spans() -> Any:
    return hea.AdaptiveSpanForCausalLM(hea.AdaptiveSpanConfig.modern(**SIZES, span_limit=8))


def reformer() -> Any:
    return hea.EfficientReformerForMaskedLM(hea.EfficientReformerConfig(**SIZES, lsh_attn_chunk_length=8))


def routing() -> Any:
    fields = {"num_routing_heads": 2, "num_clusters": 3, "cluster_tokens": 8}
    return hea.RoutingTransformerForCausalLM(hea.RoutingTransformerConfig(**SIZES, **fields))


def llama() -> Any:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    return hea.sparsify(model, Band(left=4, right=0))


def bart() -> Any:
    config = transformers.BartConfig(vocab_size=300, **SIDES, **HEADS)
    return hea.sparsify(transformers.BartForConditionalGeneration(config), Band(left=4, right=4))


MODELS: dict[str, Callable[[], Any]] = {
    each.__name__: each for each in (simplified, sparse, seq2seq, spans, reformer, routing, llama, bart)
}


def shared_model(name: str) -> Any:
    """Return a model in eval mode, every weight moved away from its start value; the same in every call."""
    torch.manual_seed(0)
    return scatter(MODELS[name]()).eval()
