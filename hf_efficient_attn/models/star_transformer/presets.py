"""The network of fastNLP, by the authors' lab, as fields of `StarTransformerConfig`; keywords change or add fields.

The sizes of the paper's own experiments are not known to us. Those below are the defaults of the library, and the
settings of its scripts for the paper's tasks, which take word vectors of width 300 (GloVe).
"""

from typing import Any, TypeVar

Config = TypeVar("Config")

FASTNLP: dict[str, Any] = {
    "hidden_size": 300,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "norm_position": "pre",
    "norm_eps": 1e-6,
    "hidden_act": "leaky_relu",
    "ring": "zero_ends",
    "classifier_head": "dense",
    "classifier_activation": "leaky_relu",
    "intermediate_size": 600,
    "embedding_dropout": 0.1,
    "classifier_dropout": 0.1,
}
SCRIPTS: dict[str, Any] = {
    **FASTNLP,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "head_dim": 50,
    "max_position_embeddings": 128,
    "intermediate_size": 200,
    "initializer_range": 0.05,
    "embedding_dropout": 0.4,
    "classifier_dropout": 0.4,
}


def fastnlp(cls: type[Config], **fields: Any) -> Config:
    """Return the update form and the default sizes of fastNLP: pre-norm, LeakyReLU, a relay without norm, an open ring.

    Its scripts set norms to 0 and matrices to N(0, 0.05²) at the start, of which only the latter is a field here.
    """
    return cls(**{**FASTNLP, **fields})


def sst(cls: type[Config], **fields: Any) -> Config:
    """Return the network of fastNLP's script for the Stanford Sentiment Treebank, in five classes."""
    return cls(**{**SCRIPTS, "num_labels": 5, **fields})


def snli(cls: type[Config], **fields: Any) -> Config:
    """Return the network of fastNLP's script for SNLI, which compares the stars of two sentences, in three classes."""
    return cls(**{**SCRIPTS, "separate_sentences": True, "num_labels": 3, **fields})


def tagging(cls: type[Config], **fields: Any) -> Config:
    """Return the network of fastNLP's scripts for parts of speech and names; set `num_labels`.

    For parts of speech they drop 0.3 and not 0.4.
    """
    return cls(**{**SCRIPTS, **fields})
