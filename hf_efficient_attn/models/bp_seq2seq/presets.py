"""The authors' networks for translation, as fields of `BPSeq2SeqConfig`; keywords change or add fields.

Sizes, k, clip distances and dropouts are those of their configuration files. Vocabularies are the data's, and are no
part of the presets. Their schedule is that of the original Transformer: a factor of 1 and 8,000 steps of warm-up for
`iwslt`, a factor of 2 for `wmt14`.
"""

from typing import Any, TypeVar

from hf_efficient_attn.models.encoder_decoder.config import fields_of_stacks

Config = TypeVar("Config")

TRANSLATION: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "num_attention_heads": 8,
    "num_nodes": 4,
    "embedding_dropout": 0.1,
    "hidden_dropout": 0.1,
    "activation_dropout": 0.1,
    "attention_dropout": 0.1,
    "label_smoothing": 0.1,
}


def iwslt(cls: type[Config], **fields: Any) -> Config:
    """Return the network for IWSLT's talks from Chinese to English, with 64 tokens of context before a sentence."""
    return cls(**{**TRANSLATION, "clip_distance": 3, **fields_of_stacks(fields)})


def wmt14(cls: type[Config], **fields: Any) -> Config:
    """Return the network for WMT14, from English to German, sentence by sentence."""
    return cls(**{**TRANSLATION, "clip_distance": 2, **fields_of_stacks(fields)})
