"""Configuration of the BP-Transformer for translation."""

from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.models.config.checks import check_token
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import DropoutFields, HeadSizes
from hf_efficient_attn.models.config.library import LibraryConfig
from hf_efficient_attn.models.encoder_decoder.model import EncoderDecoderFields, fields_of_stacks
from hf_efficient_attn.models.tree.config import TreeFields

# The authors' networks for translation, as fields of `BPSeq2SeqConfig`; keywords change or add fields.
#
# Sizes, k, clip distances and dropouts come from the authors' configuration files. Presets have no vocabulary; it
# depends on the data. The authors use the learning rate schedule of the original Transformer: with a factor of 1 and
# 8,000 warmup steps for `iwslt`, with a factor of 2 for `wmt14`.


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


@strict_config
class BPSeq2SeqConfig(EncoderDecoderFields, TreeFields, DropoutFields, HeadSizes, LibraryConfig, PreTrainedConfig):
    r"""Config of a BP-Transformer for translation: encoder over the tree of the source, decoder over the target's tree.

    The presets `iwslt` and `wmt14` are the authors' networks; every field can be changed on top.

    Args:
        encoder_layers, decoder_layers: number of layers of the two stacks.
        num_nodes: k, how many nodes of each size a token attends to on each side; in the decoder only on its left.
        clip_distance: spans above this level share its labels. Level 0 are the tokens, and a span of level j has 2^j
            tokens.
        position_embedding_type: "relation", the paper's: no positions, but a learned vector for every relation of a
            token to a node; "learned" or "sinusoidal" positions of tokens, without relations; "none".
        max_position_embeddings, max_target_position_embeddings: the rows of "learned" positions of source and target;
            otherwise both may have any length.
        label_smoothing: ε of the training loss of `BPSeq2SeqForConditionalGeneration`: weight 1 − ε on the target and
            ε / vocab_size on every token. In eval mode the loss is the plain cross-entropy.
        sentence_end_token_id: the token after which `generate` with `sentence_ids` goes on to the next sentence of the
            source; None: all generated tokens belong to the last sentence of the prompt.
        hidden_act: the activation of the MLP.
        norm_position: only "post": spans start as zeros, and a norm before attention would make them all equal.
        norm_type, norm_eps, norm_bias: "layernorm" or "rmsnorm"; `norm_bias` is for layernorm.
        attention_bias, attention_output_bias, mlp_bias, lm_head_bias: bias vectors of query, key and value; attention
            output; MLP; vocabulary. Source, target and output share the embedding.
        embedding_dropout: dropout of the embeddings, before their norm.

    Raises:
        ConfigurationError: fields that exclude each other; the message lists what is allowed.

    Source: Ye, Guo, Gan, Qiu, Zhang, "BP-Transformer: Modelling Long-Range Context via Binary Partitioning"
    (arXiv:1911.04070), and the authors' code.

    >>> config = BPSeq2SeqConfig.wmt14(vocab_size=37_000)
    >>> config.num_nodes, config.encoder_layers, config.decoder_layers
    (4, 6, 6)
    """

    model_type = "bp_seq2seq"
    papers = ("1911.04070",)
    # scores of a head in a layer, for n tokens
    attention_cost = (
        "encoder of n tokens: n · (log2 n + 1) between spans and their tokens, and about 2 · num_nodes · n · log2(n / "
        "num_nodes) between tokens and nodes; decoder of m tokens: the same with half of the nodes, and m · n of "
        "cross-attention, or only the pairs of aligned sentences"
    )

    vocab_size: int = 32_000
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_attention_heads: int = 8

    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1
    sentence_end_token_id: int | None = None

    @classmethod
    def iwslt(cls, **fields: Any) -> "BPSeq2SeqConfig":
        """Return the network for IWSLT talks, Chinese to English, with 64 tokens of context before each sentence."""
        return cls(**{**TRANSLATION, "clip_distance": 3, **fields_of_stacks(fields)})

    @classmethod
    def wmt14(cls, **fields: Any) -> "BPSeq2SeqConfig":
        """Return the network for WMT14, English to German, sentence by sentence."""
        return cls(**{**TRANSLATION, "clip_distance": 2, **fields_of_stacks(fields)})

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields."""
        super().check()
        self.check_label_smoothing()
        check_token(self, "sentence_end_token_id")


__all__ = ["BPSeq2SeqConfig"]
