"""The authors' networks, as fields of `BPTransformerConfig`; keywords change or add fields.

Sizes, k and dropouts are those of their configuration files. Two of these networks read only to the left when they
classify, in the released code; `is_causal=True` does so here.
"""

from typing import Any, TypeVar

Config = TypeVar("Config")

CLASSIFIER: dict[str, Any] = {
    "hidden_size": 300,
    "intermediate_size": 600,
    "num_attention_heads": 6,
    "hidden_dropout": 0.1,
    "activation_dropout": 0.1,
    "attention_dropout": 0.3,
}
CHARACTERS: dict[str, Any] = {
    "is_causal": True,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_nodes": 64,
    "tie_word_embeddings": True,
    "layer_losses": True,
    "embedding_dropout": 0.1,
    "hidden_dropout": 0.1,
    "activation_dropout": 0.1,
    "attention_dropout": 0.1,
    "max_position_embeddings": 8192,
}
# clip distance by length of the text in training
CLIP_DISTANCES = {512: 2, 1024: 3, 2048: 4, 4096: 5, 8192: 6}


def sst5(cls: type[Config], **fields: Any) -> Config:
    """Return the network for the Stanford Sentiment Treebank in five classes; its words start as GloVe's 300 numbers.

    Vocabularies are the data's, and are no part of the presets.
    """
    own = {
        "num_hidden_layers": 4,
        "num_nodes": 2,
        "clip_distance": 2,
        "num_labels": 5,
        "embedding_dropout": 0.4,
        "classifier_dropout": 0.4,
    }
    return cls(**{**CLASSIFIER, **own, **fields})


def imdb(cls: type[Config], **fields: Any) -> Config:
    """Return the network for IMDB's reviews in two classes."""
    own = {
        "num_hidden_layers": 5,
        "num_nodes": 4,
        "clip_distance": 5,
        "embedding_dropout": 0.5,
        "classifier_dropout": 0.5,
    }
    return cls(**{**CLASSIFIER, **own, **fields})


def snli(cls: type[Config], **fields: Any) -> Config:
    """Return the network for SNLI's pairs of sentences in three classes.

    Three layers read each sentence, and three more the other one, too. Of these the sources we have say their number
    alone; here their tokens read the other sentence's as a decoder reads its source.
    """
    own = {
        "num_hidden_layers": 3,
        "cross_layers": 3,
        "num_nodes": 4,
        "clip_distance": 2,
        "num_labels": 3,
        "separate_sentences": True,
        "embedding_dropout": 0.5,
        "classifier_dropout": 0.5,
        "classifier_head": "dense",
        "classifier_activation": "relu",
    }
    return cls(**{**CLASSIFIER, **own, **fields})


def enwik8(cls: type[Config], **fields: Any) -> Config:
    """Return the character model of enwik8, in bytes, for texts of 8,192; their clip distance is 6.

    In shorter texts the authors clip at 2 (512), 3 (1,024), 4 (2,048) and 5 (4,096).
    """
    return cls(**{**CHARACTERS, "vocab_size": 256, "clip_distance": CLIP_DISTANCES[8192], **fields})


def text8(cls: type[Config], **fields: Any) -> Config:
    """Return the same for text8: 26 letters and the blank."""
    return cls(**{**CHARACTERS, "vocab_size": 27, "clip_distance": CLIP_DISTANCES[8192], **fields})
