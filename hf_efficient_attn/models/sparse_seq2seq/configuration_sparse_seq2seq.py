"""Configuration of the sparse encoder-decoder: an encoder whose layers follow patterns, and a causal decoder."""

from transformers import PreTrainedConfig

from hf_efficient_attn.models.config.choices import check_fields
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import DropoutFields, HeadSizes
from hf_efficient_attn.models.config.library import LibraryConfig
from hf_efficient_attn.models.config.patterns import check_attention, write_pattern
from hf_efficient_attn.models.encoder_decoder.config import EncoderDecoderFields
from hf_efficient_attn.models.sparse.config import SparseFields

from . import presets

CHOICES = {
    "position_embedding_type": ("learned", "sinusoidal", "none"),
    "matrix_init": ("normal", "glorot"),
    "classifier_head": ("linear", "dense"),
}


@strict_config
class SparseSeq2SeqConfig(
    EncoderDecoderFields, SparseFields, DropoutFields, HeadSizes, LibraryConfig, PreTrainedConfig
):
    r"""Describe an encoder-decoder whose encoder follows patterns: LED, BigBird-Pegasus, and the Transformer of 2017.

    The presets `led`, `bigbird_pegasus` and `vanilla` set the papers' defaults; every field can be changed on top.

    Args:
        attention_pattern: who reads whom in the encoder, in any form that `sparsify` takes: a pattern, its dict, a list
            per layer, or a tile; {"encoder": ..., "decoder": ...} also gives the decoder's self-attention a pattern, in
            its causal form. None: full attention. Every target token reads the whole source.
        global_tokens: which source tokens read, and are read by, everything, if a call has no
            `global_attention_mask`: "first"; "question", those before the first `sep_token_id`; "choice", those after
            its second part begins; {"positions": [...]}; {"token_ids": [...]}; {"every": k}; None; "auto": by the head,
            "first" in sequence classification, "question" in question answering, none elsewhere.
        global_projections: global tokens read with query, key and value projections of their own, which start as
            copies.
        max_global_tokens: how many global tokens an example may have in a compiled or exported model with
            `global_projections`, which cannot count them.
        random_blocks_in_eval: "fixed", the same random blocks always (BigBird's paper and authors), or "transformers",
            which replaces them by copies of block 0 in eval mode.
        full_attention_up_to: sources of at most this many tokens are read by full attention (transformers'
            BigBird-Pegasus: 704); None: the pattern holds at every length.
        norm_position: "post", as in Vaswani et al. and BART, or "pre", with another norm after each stack.
        norm_type, norm_eps, norm_bias: "layernorm" or "rmsnorm"; `norm_bias` is for layernorm.
        norm_before_first_layer: False leaves out the first norm of both stacks in pre-norm models.
        embedding_norm: a norm on the sum of token and position embeddings.
        position_embedding_type: "learned", "sinusoidal" or "none".
        max_position_embeddings: longest source in tokens, of "learned" positions.
        max_target_position_embeddings: longest target in tokens, of "learned" positions.
        position_offset: rows of the learned tables before that of position 0; 2 in BART, 0 in LED.
        sinusoid_layout: "interleaved" (Vaswani et al.) or "halves" (Marian, Pegasus).
        scale_embedding: multiply token embeddings by √hidden_size.
        matrix_init: start of matrices: "normal" with `initializer_range`, or "glorot" (uniform).
        embedding_init_std: start of token embeddings; None: `initializer_range`. Scaled embeddings have unit variance
            with hidden_size**-0.5.
        embedding_dropout, hidden_dropout, activation_dropout, attention_dropout, classifier_dropout: of the sum of the
            embeddings, of what attention and MLP add, of the MLP's inner activations, of attention weights, and before
            the labels; 0 except in the presets: the papers' networks drop embeddings and hidden states with 0.1
            (`vanilla` "big": 0.3). Each is an `nn.Dropout` of the model.
        attention_bias, attention_output_bias, mlp_bias: bias vectors of query, key and value; output; MLP.
        lm_head_bias: a bias on the projection to the vocabulary, which is the token embedding if
            `tie_word_embeddings`. Source and target always share the embedding.
        label_smoothing: ε of the training loss of `SparseSeq2SeqForConditionalGeneration`: weight 1 − ε on the target
            and ε / vocab_size on every token. In eval mode the loss is the plain cross-entropy, whose exponential is
            the perplexity.
        classifier_head, classifier_activation: "dense", a map of `hidden_size` and an activation before the labels, as
            in BART; or "linear".

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
        "in the encoder the pairs of attention_pattern, such as n · (left + right + 1) of a band; "
        "in the decoder of m tokens m² / 2 and m · n"
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

    led = classmethod(presets.led)
    bigbird_pegasus = classmethod(presets.bigbird_pegasus)
    vanilla = classmethod(presets.vanilla)

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields; write the pattern in JSON types."""
        check_fields(self, CHOICES)
        self.check_head_sizes()
        self.check_label_smoothing()
        check_attention(self)
        write_pattern(self)


__all__ = ["SparseSeq2SeqConfig"]
