"""Configuration of the Star-Transformer."""

from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.models.config.checks import check_fields, refuse_pattern
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import DropoutFields, NormFields, OwnHeadDim
from hf_efficient_attn.models.config.library import LibraryConfig

# Which fields of a `StarTransformerConfig` exclude each other, and what to do about it.


CHOICES: dict[str, tuple[Any, ...]] = {
    "ring": ("closed", "open", "zero_ends"),
    "relay_init": ("mean", "learned"),
    "position_embedding_type": ("learned", "sinusoidal", "none"),
    "classifier_pooling": ("relay_max", "relay", "max", "mean"),
    "classifier_head": ("linear", "dense"),
}


def check_star(config: Any) -> None:
    """Raise ConfigurationError for fields that no star can have; write `head_dim` if it is None."""
    if config.is_causal:
        raise ConfigurationError(
            "is_causal=True: the relay attends to every token of a text, and every token attends to the relay, so "
            "every token would depend on later ones. There is no causal form; use SparseTransformerConfig or "
            "AdaptiveSpanConfig."
        )
    refuse_pattern(config, "tokens of a star attend to their neighbours, their own embedding and the relay")
    config.check_head_sizes()
    if config.position_embedding_type == "sinusoidal" and config.hidden_size % 2:
        raise ConfigurationError(f"Sinusoidal positions need an even hidden_size, not {config.hidden_size}.")
    if config.tie_word_embeddings and config.embedding_width != config.hidden_size:
        raise ConfigurationError(
            f"tie_word_embeddings=True, but embedding_size={config.embedding_size} and "
            f"hidden_size={config.hidden_size} differ. Use tie_word_embeddings=False, or leave embedding_size out."
        )


# The network of fastNLP, by the authors' lab, as fields of `StarTransformerConfig`; keywords change or add fields.
#
# We do not know the sizes of the paper's own experiments. Those below are the defaults of the library, and the settings
# of its scripts for the paper's tasks, which use word vectors of width 300 (GloVe).


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


@strict_config
class StarTransformerConfig(NormFields, DropoutFields, OwnHeadDim, LibraryConfig, PreTrainedConfig):
    r"""Config of a Star-Transformer: tokens on a ring attend to their two neighbours and to a relay in the middle.

    By default updates are those of the paper. The presets `fastnlp`, `sst`, `snli` and `tagging` are the networks of
    the library fastNLP, whose updates differ; every field can be changed on top.

    Args:
        num_hidden_layers: T, the number of updates of all tokens and then the relay.
        share_layers: whether all updates share their parameters; False: each has its own.
        norm_position: "post", as in the paper: h ← N(act(attention)), for tokens and relay. "pre", as in fastNLP: h ←
            act(attention); tokens attend to the normed states of themselves and their neighbours, and to their
            embedding and the relay without a norm; the relay has no norm.
        norm_type, norm_eps, norm_bias: "layernorm" or "rmsnorm"; `norm_bias` is for layernorm.
        hidden_act: the activation of an update, "relu" (the paper) or "leaky_relu" (fastNLP) among others.
        ring: what the first and the last token of a text attend to instead of the missing neighbour. "closed": each
            other; "open": nothing; "zero_ends": a key and a value of zeros, which take part in the softmax (fastNLP).
        relay_init: the initial relay: the "mean" of the embeddings of a text, or a "learned" parameter.
        head_dim: width of a head; None: hidden_size / num_attention_heads.
        embedding_size: width of the token embeddings; a linear map then brings them to hidden_size. None: hidden_size,
            without a map.
        attention_bias, attention_output_bias: bias vectors of queries, keys and values; of the output of attention.
        position_embedding_type: "learned", "sinusoidal" or "none". Without positions a reversed text gives the same
            states, because a token does not know which neighbour is the left one.
        separate_sentences: whether tokens of type 0 and type 1 (`token_type_ids`) are two sentences, which do not
            attend to each other and have a relay each; classifiers compare them, see `classifier_pooling`.
        type_vocab_size: number of token types, which have an embedding each; 0: none.
        classifier_pooling: what represents a text: "relay_max", the mean of the relay and of the maximum over tokens,
            "relay", "max" or "mean". With `separate_sentences` u and v of the two sentences become
            [u; v; |u − v|; u · v].
        classifier_head: head for texts and tokens: "linear", or "dense": a dense layer and `classifier_activation` come
            first.
        intermediate_size: width of that dense layer; updates have no MLP.
        hidden_dropout, activation_dropout: dropout of the output of attention, before and after the activation.
        embedding_dropout: dropout of the embeddings wherever an update uses them.
        is_causal: only False, because the relay attends to every token, and every token to the relay.

    Raises:
        ConfigurationError: fields that exclude each other; the message lists what is allowed.

    Source: Guo et al., "Star-Transformer" (arXiv:1902.09113).

    >>> StarTransformerConfig.fastnlp().norm_position, StarTransformerConfig().ring
    ('pre', 'closed')
    """

    model_type = "star_transformer"
    papers = ("1902.09113",)
    # scores of a head in a layer, for n tokens
    attention_cost = "6 · n + 1: five keys for each token, n + 1 keys for the relay"

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    head_dim: int | None = None
    embedding_size: int | None = None
    is_causal: bool = False

    ring: str = "closed"
    relay_init: str = "mean"
    share_layers: bool = False
    hidden_act: str = "relu"
    norm_eps: float | int = 1e-6
    attention_bias: bool = True
    attention_output_bias: bool = True

    position_embedding_type: str = "learned"
    max_position_embeddings: int = 512
    type_vocab_size: int = 0
    initializer_range: float | int = 0.02

    separate_sentences: bool = False
    classifier_pooling: str = "relay_max"
    classifier_head: str = "linear"
    classifier_activation: str = "leaky_relu"
    lm_head_bias: bool = False

    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def fastnlp(cls, **fields: Any) -> "StarTransformerConfig":
        """Return the update form and the default sizes of fastNLP: pre-norm, LeakyReLU, a relay without norm, an open
        ring.

        Its scripts initialise norms with 0 and matrices with N(0, 0.05²); only the latter is a field here.
        """
        return cls(**{**FASTNLP, **fields})

    @classmethod
    def sst(cls, **fields: Any) -> "StarTransformerConfig":
        """Return the network of fastNLP's script for the Stanford Sentiment Treebank, in five classes."""
        return cls(**{**SCRIPTS, "num_labels": 5, **fields})

    @classmethod
    def snli(cls, **fields: Any) -> "StarTransformerConfig":
        """Return the network of fastNLP's script for SNLI, which compares the stars of two sentences, in three
        classes.
        """
        return cls(**{**SCRIPTS, "separate_sentences": True, "num_labels": 3, **fields})

    @classmethod
    def tagging(cls, **fields: Any) -> "StarTransformerConfig":
        """Return the network of fastNLP's scripts for parts of speech and names; set `num_labels`.

        The script for parts of speech has a dropout of 0.3, not 0.4.
        """
        return cls(**{**SCRIPTS, **fields})

    # tensor parallelism splits by heads
    base_model_tp_plan = {
        f"layers.*.{attention}.{name}_proj": "rowwise" if name == "o" else "colwise"
        for attention in ("self_attn", "relay_attn")
        for name in "qkvo"
    }
    # fields of shared modules that are the same in every star
    scale_embedding = False
    embedding_norm = False

    @property
    def embedding_width(self) -> int:
        """Width of the token embeddings."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def sinusoid_amplitude(self) -> float | int:
        """The factor of sinusoids, so that they are as large as the embeddings they are added to."""
        return self.initializer_range

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields; write `head_dim` if it is None."""
        check_fields(self, CHOICES)
        check_star(self)


__all__ = ["StarTransformerConfig"]
