"""Configuration of the BP-Transformer."""

from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import DropoutFields, HeadSizes
from hf_efficient_attn.models.config.library import LibraryConfig
from hf_efficient_attn.models.tree.config import TreeFields, check_pairs_and_losses

# The authors' networks, as fields of `BPTransformerConfig`; keywords change or add fields.
#
# Sizes, k and dropouts come from the authors' configuration files. In the released code, two of these networks attend
# only to the left when they classify; here, `is_causal=True` does the same.


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
# clip distance by length of the training texts
CLIP_DISTANCES = {512: 2, 1024: 3, 2048: 4, 4096: 5, 8192: 6}


@strict_config
class BPTransformerConfig(TreeFields, DropoutFields, HeadSizes, LibraryConfig, PreTrainedConfig):
    r"""Config of a BP-Transformer: attention over the nodes of a binary tree of spans, short nearby and long far off.

    The presets `sst5`, `imdb`, `snli`, `enwik8` and `text8` are the authors' networks; every field can be changed.

    Args:
        num_nodes: k, how many nodes of each size a token attends to on each side.
        clip_distance: spans above this level share its labels. Level 0 are the tokens, and a span of level j has 2^j
            tokens.
        is_causal: whether tokens attend only to themselves and to nodes that end before them; False: to nodes on both
            sides. Spans always attend to all of their own tokens.
        position_embedding_type: "relation", the paper's: no positions, but a learned vector for every relation of a
            token to a node (the level, the side, the place), added to the keys of all heads of a layer; "learned" or
            "sinusoidal" positions of tokens, without relations; "none".
        max_position_embeddings: the rows of "learned" positions; otherwise texts may have any length.
        hidden_act: the activation of the MLP.
        norm_position: only "post": spans start as zeros, and a norm before attention would make them all equal.
        norm_type, norm_eps, norm_bias: "layernorm" or "rmsnorm"; `norm_bias` is for layernorm.
        attention_bias, attention_output_bias, mlp_bias, lm_head_bias: bias vectors of query, key and value; attention
            output; MLP; vocabulary.
        embedding_dropout: dropout of the embeddings, before their norm.
        classifier_pooling: what represents a text: "root", the span of all tokens; the "first" or "last" token, or the
            "mean" of all.
        classifier_head: "linear", or "dense": a dense layer and `classifier_activation` come first.
        separate_sentences: whether tokens of type 0 and type 1 (`token_type_ids`) are two sentences, each with its own
            tree. The classifier gets the representations of both, concatenated.
        cross_layers: number of layers after the others, in which each token of a sentence also attends to all tokens of
            the other sentence; None: there are none.
        layer_losses: whether a causal language model in training also predicts from earlier layers: first from all of
            them, and from fewer as training advances (see `LayerLossCallback`). The loss is the mean over these layers.

    Raises:
        ConfigurationError: fields that exclude each other; the message lists what is allowed.

    Source: Ye, Guo, Gan, Qiu, Zhang, "BP-Transformer: Modelling Long-Range Context via Binary Partitioning"
    (arXiv:1911.04070), and the authors' code.

    >>> config = BPTransformerConfig.imdb()
    >>> config.num_nodes, config.pattern
    (4, InterleavedSpanTree(num_nodes=4, left_only=False, num_tokens=None))
    """

    model_type = "bp_transformer"
    papers = ("1911.04070",)
    # scores of a head in a layer, for n tokens
    attention_cost = (
        "n · (log2 n + 1) between spans and their tokens, and about 2 · num_nodes · n · log2(n / num_nodes) between "
        "tokens and nodes (half if causal)"
    )

    vocab_size: int = 256
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    is_causal: bool = False

    classifier_pooling: str = "root"
    classifier_head: str = "linear"
    classifier_activation: str = "tanh"
    separate_sentences: bool = False
    cross_layers: int | None = None
    layer_losses: bool = False

    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def sst5(cls, **fields: Any) -> "BPTransformerConfig":
        """Return the network for the Stanford Sentiment Treebank with five classes.

        Its word embeddings start as the 300-dimensional vectors of GloVe. Presets have no vocabulary; it depends on the
        data.
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

    @classmethod
    def imdb(cls, **fields: Any) -> "BPTransformerConfig":
        """Return the network for IMDB reviews with two classes."""
        own = {
            "num_hidden_layers": 5,
            "num_nodes": 4,
            "clip_distance": 5,
            "embedding_dropout": 0.5,
            "classifier_dropout": 0.5,
        }
        return cls(**{**CLASSIFIER, **own, **fields})

    @classmethod
    def snli(cls, **fields: Any) -> "BPTransformerConfig":
        """Return the network for the sentence pairs of SNLI with three classes.

        Three layers attend within each sentence, and three more also attend to the other sentence. Our sources give
        only the number of these layers; here their tokens attend to the other sentence as a decoder attends to its
        source.
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

    @classmethod
    def enwik8(cls, **fields: Any) -> "BPTransformerConfig":
        """Return the byte-level model of enwik8 for texts of 8,192 bytes, with a clip distance of 6.

        For shorter texts the authors use clip distances of 2 (512), 3 (1,024), 4 (2,048) and 5 (4,096).
        """
        return cls(**{**CHARACTERS, "vocab_size": 256, "clip_distance": CLIP_DISTANCES[8192], **fields})

    @classmethod
    def text8(cls, **fields: Any) -> "BPTransformerConfig":
        """Return the model of `enwik8` for text8: 26 letters and the space."""
        return cls(**{**CHARACTERS, "vocab_size": 27, "clip_distance": CLIP_DISTANCES[8192], **fields})

    # attention is replicated, because its heads share the vectors of relations
    base_model_tp_plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields."""
        super().check()
        check_pairs_and_losses(self)


__all__ = ["BPTransformerConfig"]
