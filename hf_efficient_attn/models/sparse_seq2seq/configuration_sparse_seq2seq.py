"""Configuration of the sparse encoder-decoder: an encoder whose layers follow patterns, and a causal decoder."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.checks import check_attention, check_fields, write_pattern
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import DropoutFields, HeadSizes, SparseFields
from hf_efficient_attn.models.config.library import LibraryConfig
from hf_efficient_attn.models.encoder_decoder.model import EncoderDecoderFields, fields_of_stacks
from hf_efficient_attn.patterns.bands import band_of_window
from hf_efficient_attn.patterns.big_bird import bigbird

# The published shapes of the sparse encoder-decoder, as presets of its config.
#
# Each preset is a classmethod of `SparseSeq2SeqConfig`; keywords change or add fields.


LED_SIZES: dict[str, dict[str, int]] = {
    "base": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "encoder_layers": 6,
        "decoder_layers": 6,
    },
    "large": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "encoder_layers": 12,
        "decoder_layers": 12,
    },
}
VANILLA_SIZES: dict[str, dict[str, Any]] = {
    "base": {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8},
    "big": {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
}
# the dropout of BART and Pegasus
DROPOUT = {"embedding_dropout": 0.1, "hidden_dropout": 0.1}
VANILLA_DROPOUT = {"base": 0.1, "big": 0.3}


def _check_size(size: str, sizes: dict[str, Any]) -> None:
    if size not in sizes:
        raise ConfigurationError(f"size={shown(size)}; it must be one of: {', '.join(sizes)}.")


CHOICES = {
    "position_embedding_type": ("learned", "sinusoidal", "none"),
    "matrix_init": ("normal", "glorot"),
    "classifier_head": ("linear", "dense"),
}


@strict_config
class SparseSeq2SeqConfig(
    EncoderDecoderFields, SparseFields, DropoutFields, HeadSizes, LibraryConfig, PreTrainedConfig
):
    r"""Config of an encoder-decoder with a sparse encoder: LED, BigBird-Pegasus, and the Transformer of 2017.

    The presets `led`, `bigbird_pegasus` and `vanilla` set the papers' defaults; every field can be changed on top.

    Args:
        attention_pattern: which token attends to which in the encoder, in any form that `sparsify` takes: a pattern,
            its dict, a list with one per layer, or a tile. {"encoder": ..., "decoder": ...} also gives the decoder's
            self-attention a pattern, in its causal form. None: full attention. Every target token attends to the whole
            source.
        global_tokens: which source tokens attend to all tokens and are attended to by all, if a call has no
            `global_attention_mask`: "first"; "question", those before the first `sep_token_id`; "choice", those after
            its second part begins; {"positions": [...]}; {"token_ids": [...]}; {"every": k}; None; "auto": depends on
            the head, "first" in sequence classification, "question" in question answering, none elsewhere.
        global_projections: whether global tokens have their own query, key and value projections, which start as copies
            of the others.
        max_global_tokens: how many global tokens an example may have in a compiled or exported model with
            `global_projections`; such a model cannot count them.
        random_blocks_in_eval: "fixed": always the same random blocks (BigBird's paper and authors); "transformers": in
            eval mode copies of block 0 replace them.
        full_attention_up_to: sources of at most this many tokens have full attention (transformers' BigBird-Pegasus:
            704); None: the pattern holds at every length.
        norm_position: "post", as in Vaswani et al. and BART, or "pre", with another norm after each stack.
        norm_type, norm_eps, norm_bias: "layernorm" or "rmsnorm"; `norm_bias` is for layernorm.
        norm_before_first_layer: whether pre-norm stacks have a norm before the first layer.
        embedding_norm: whether the sum of token and position embeddings has a norm.
        position_embedding_type: "learned", "sinusoidal" or "none".
        max_position_embeddings: longest source in tokens, of "learned" positions.
        max_target_position_embeddings: longest target in tokens, of "learned" positions.
        position_offset: rows of the learned tables before that of position 0; 2 in BART, 0 in LED.
        sinusoid_layout: "interleaved" (Vaswani et al.) or "halves" (Marian, Pegasus).
        scale_embedding: whether token embeddings are multiplied by √hidden_size.
        matrix_init: initialisation of matrices: "normal" with `initializer_range`, or "glorot" (uniform).
        embedding_init_std: initial standard deviation of token embeddings; None: `initializer_range`. Scaled embeddings
            have unit variance with hidden_size**-0.5.
        embedding_dropout, hidden_dropout, activation_dropout, attention_dropout, classifier_dropout: dropout of the sum
            of the embeddings, of the outputs of attention and MLP, of the MLP's inner activations, of attention
            weights, and before the classifier. By default 0, except in the presets: as in the papers, embeddings and
            hidden states have 0.1 (`vanilla` "big": 0.3). Each is an `nn.Dropout` of the model.
        attention_bias, attention_output_bias, mlp_bias: bias vectors of query, key and value; output; MLP.
        lm_head_bias: whether the projection to the vocabulary has a bias. With `tie_word_embeddings` this projection is
            the token embedding. Source and target always share the embedding.
        label_smoothing: ε of the training loss of `SparseSeq2SeqForConditionalGeneration`: weight 1 − ε on the target
            and ε / vocab_size on every token. In eval mode the loss is the plain cross-entropy, whose exponential is
            the perplexity.
        classifier_head, classifier_activation: "dense": a layer of `hidden_size` and this activation come first, as in
            BART; or "linear".

    Raises:
        ConfigurationError: fields that exclude each other; the message lists what is allowed.

    Sources: Vaswani et al. (arXiv:1706.03762); Beltagy et al. (arXiv:2004.05150), section 7; Zaheer et al.
    (arXiv:2007.14062), section 4.1.

    >>> config = SparseSeq2SeqConfig.led(attention_window=64)
    >>> config.attention_pattern["encoder"]["left"], config.attention_pattern["decoder"]
    (32, None)
    """

    model_type = "sparse_seq2seq"
    papers = ("1706.03762", "2004.05150", "2007.14062")
    # scores of a head in a layer, for n tokens
    attention_cost = (
        "encoder: the pairs of attention_pattern, such as n · (left + right + 1) for a band; decoder of m tokens: m² / "
        "2, and m · n of cross-attention"
    )

    vocab_size: int = 50_265
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_attention_heads: int = 12

    embedding_init_std: float | int | None = None
    matrix_init: str = "normal"

    lm_head_bias: bool = False
    classifier_head: str = "dense"
    classifier_activation: str = "tanh"

    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    sep_token_id: int | None = None
    decoder_start_token_id: int | None = 2

    @classmethod
    def led(
        cls, size: str = "base", attention_window: int | Sequence[int] = 1024, **fields: Any
    ) -> "SparseSeq2SeqConfig":
        """Return LED: BART's layout with windows in the encoder, and its first token global.

        Args:
            size: "base" (6 + 6 layers of 768) or "large" (12 + 12 layers of 1,024).
            attention_window: how many source tokens around itself a source token attends to, both sides together, an
                even number; a list gives one per encoder layer.

        Source: Beltagy et al. (arXiv:2004.05150), section 7; position tables of 16,384 and 1,024 rows as released.
        """
        _check_size(size, LED_SIZES)
        is_per_layer = isinstance(attention_window, list | tuple)
        patterns = [band_of_window(window) for window in (attention_window if is_per_layer else [attention_window])]
        preset: dict[str, Any] = {
            **LED_SIZES[size],
            **DROPOUT,
            "attention_pattern": patterns if is_per_layer else patterns[0],
            "global_tokens": "first",
            "global_projections": True,
            "max_position_embeddings": 16_384,
            "lm_head_bias": True,
            "sep_token_id": 2,
        }
        return cls(**{**preset, **fields_of_stacks(fields)})

    @classmethod
    def bigbird_pegasus(
        cls,
        block_tokens: int = 64,
        num_random_blocks: int = 3,
        plan: str = "authors",
        seed: int = 0,
        **fields: Any,
    ) -> "SparseSeq2SeqConfig":
        """Return BigBird-Pegasus large: Pegasus' pre-norm layout without attention biases, BigBird-ITC in the encoder.

        Args:
            plan: how random blocks are drawn: "authors", "transformers" or "seeded"; see `patterns.bigbird`.
            seed: seed of the random blocks; the authors use 0.

        Source: Zaheer et al. (arXiv:2007.14062), section 4.1, and the fields of transformers' BigBirdPegasusConfig.
        """
        preset: dict[str, Any] = {
            **DROPOUT,
            "vocab_size": 96_103,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "encoder_layers": 16,
            "decoder_layers": 16,
            "num_attention_heads": 16,
            "attention_pattern": bigbird(block_tokens, num_random_blocks, seed, plan),
            "hidden_act": "gelu_new",
            "attention_bias": False,
            "attention_output_bias": False,
            "norm_position": "pre",
            "embedding_norm": False,
            "max_position_embeddings": 4096,
            "max_target_position_embeddings": 4096,
            "scale_embedding": True,
            "lm_head_bias": True,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "decoder_start_token_id": 2,
        }
        return cls(**{**preset, **fields_of_stacks(fields)})

    @classmethod
    def vanilla(cls, size: str = "base", **fields: Any) -> "SparseSeq2SeqConfig":
        """Return the original Transformer: full attention, post-norm, interleaved sinusoids, one shared scaled
        embedding.

        As in the paper, attention weights and inner MLP activations have no dropout. The paper does not mention biases;
        they are those of `torch.nn.Transformer`. There is no norm after the stacks. Matrices are initialised by
        Glorot's uniform rule, the embedding with unit variance after scaling.

        Args:
            size: "base" (width 512, 8 heads, dropout 0.1) or "big" (width 1,024, 16 heads, dropout 0.3).

        Source: Vaswani et al. (arXiv:1706.03762), sections 3 and 5, table 3.
        """
        _check_size(size, VANILLA_SIZES)
        fields = {**VANILLA_SIZES[size], **fields}
        preset: dict[str, Any] = {
            "vocab_size": 37_000,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "hidden_act": "relu",
            "embedding_norm": False,
            "position_embedding_type": "sinusoidal",
            "scale_embedding": True,
            "embedding_init_std": fields["hidden_size"] ** -0.5,
            "matrix_init": "glorot",
            **dict.fromkeys(DROPOUT, VANILLA_DROPOUT[size]),
            "label_smoothing": 0.1,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        }
        return cls(**{**preset, **fields_of_stacks(fields)})

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields; write the pattern in JSON types."""
        check_fields(self, CHOICES)
        self.check_head_sizes()
        self.check_label_smoothing()
        check_attention(self)
        write_pattern(self)


__all__ = ["SparseSeq2SeqConfig"]
