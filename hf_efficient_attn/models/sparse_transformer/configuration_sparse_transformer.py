"""Configuration of the sparse Transformer: an encoder or a causal decoder whose layers follow patterns."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.integration.layer_patterns import DECODER, config_patterns
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.checks import check_attention, check_fields, write_pattern
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import (
    BERT_DROPOUT,
    BertBlockFields,
    DropoutFields,
    GatedMLPFields,
    HeadSizes,
    SparseFields,
)
from hf_efficient_attn.models.config.library import LibraryConfig
from hf_efficient_attn.patterns.algebra import PerHead
from hf_efficient_attn.patterns.bands import Band, Dilated, Strided, band_of_window
from hf_efficient_attn.patterns.big_bird import bigbird
from hf_efficient_attn.patterns.blocks import BlockLocal
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Pattern

# The published shapes of the sparse Transformer, as presets of its config.
#
# Each preset is a classmethod of `SparseTransformerConfig`; keywords change or add fields.


CAUSAL: dict[str, Any] = {
    "is_causal": True,
    "norm_position": "pre",
    "embedding_norm": False,
    "position_embedding_type": "rope",
    "lm_head_transform": False,
    "lm_head_bias": False,
}


def _window(side: int, steps: Sequence[int], num_heads: int) -> Pattern:
    """Return windows of `side` keys on each side, spaced by each head's step, so that they reach that much farther."""
    if len(steps) != num_heads or any(type(step) is not int or step < 1 for step in steps):
        raise ConfigurationError(
            f"attention_dilation has the steps {shown(list(steps))} for the {num_heads} heads of a layer; give one "
            "step of at least 1 for all heads, or one for each head."
        )
    heads = [Band(side, side) if step == 1 else Dilated(side * step, side * step, step) for step in steps]
    return heads[0] if len(set(heads)) == 1 else PerHead(heads)


def _per_layer(name: str, value: Any, num_layers: int) -> list[Any]:
    values = list(value) if isinstance(value, list | tuple) else [value] * num_layers
    if len(values) != num_layers:
        raise ConfigurationError(f"{name} lists {len(values)} values for {num_layers} layers; give one for each layer.")
    return values


CHOICES = {
    "classifier_head": ("linear", "dense", "transform"),
    "question_answering_head": ("linear", "residual_mlp", "transform"),
}


@strict_config
class SparseTransformerConfig(
    BertBlockFields, SparseFields, GatedMLPFields, DropoutFields, HeadSizes, LibraryConfig, PreTrainedConfig
):
    r"""Config of a Transformer with sparse attention patterns: Longformer, BigBird, or any other.

    The presets `longformer`, `longformer_char_lm`, `bigbird_itc`, `block_local`, `strided` and `sliding` set the
    papers' defaults; every field can be changed on top.

    Args:
        attention_pattern: which token attends to which, in any form that `sparsify` takes: a pattern, its dict, a list
            with one per layer, or a tile. Causal models use its causal form. None: full (or causal) attention.
        is_causal: whether each token attends only to itself and the past (language models); False: to both sides.
        global_tokens: which tokens attend to all tokens and are attended to by all (in a causal model tokens attend
            only to earlier ones), whatever the pattern says, if a call has no `global_attention_mask`: "first";
            "question", those before the first `sep_token_id`; "choice", those after its second part begins;
            {"positions": [...]}; {"token_ids": [...]}; {"every": k}; None; "auto": depends on the head, "first" in
            sequence classification, "question" in question answering, "choice" in multiple choice, none elsewhere.
        global_projections: whether global tokens have their own query, key and value projections, which start as copies
            of the others.
        max_global_tokens: how many global tokens an example may have in a compiled or exported model with
            `global_projections`; such a model cannot count them.
        random_blocks_in_eval: "fixed": always the same random blocks (BigBird's paper and authors); "transformers": in
            eval mode copies of block 0 replace them (padded rows still differ from transformers, which treats padding
            as text). Causal models have only "fixed".
        full_attention_up_to: inputs of at most this many tokens, padding included, have full attention (transformers'
            BigBird: 704); None: the pattern holds at every length. Causal models cannot have it, and with it longer
            rows cannot be packed.
        norm_position: "post", as in BERT, or "pre", with another norm after the last block.
        norm_type, norm_eps, norm_bias: "layernorm" or "rmsnorm"; `norm_bias` is for layernorm.
        norm_before_first_layer: whether a pre-norm model has a norm before the first layer; ModernBERT has none.
        embedding_norm: whether the sum of the embeddings has a norm.
        position_embedding_type: "learned", "sinusoidal", "relative" (Transformer-XL's, within windows), "rope", "none".
        max_position_embeddings: longest input in tokens of "learned" positions.
        position_offset: rows of the learned table before that of position 0; 2 in RoBERTa. `position_ids` count from 0.
        sinusoid_layout: "interleaved" (Vaswani et al.) or "halves" (Marian, Pegasus).
        scale_embedding: whether token embeddings are multiplied by √hidden_size.
        rope_theta_per_layer: a list with the base of the rotary frequencies of each layer, instead of
            `rope_parameters`.
        type_vocab_size: number of token types; 0: none.
        embedding_dropout, hidden_dropout, activation_dropout, attention_dropout, classifier_dropout: dropout of the sum
            of the embeddings, of the outputs of attention and MLP, of the MLP's inner activations, of attention
            weights, and before the classifier. By default 0, except in the presets of papers that use dropout: 0.1 in
            `longformer` and `bigbird_itc`, as in RoBERTa and BERT (not in their causal forms, which no paper has), 0.2
            or 0.4 in `longformer_char_lm`. Each is an `nn.Dropout` of the model.
        attention_bias, attention_output_bias, mlp_bias: bias vectors of query, key and value; output; MLP.
        gated_mlp: whether the MLP computes act(x·W_gate) * (x·W_up), as in ModernBERT.
        lm_head_transform, lm_head_bias: whether a linear map, activation and norm come before the projection to the
            vocabulary, as in BERT; and whether the projection has a bias.
        lm_transform_bias, lm_transform_activation: whether that linear map has a bias, and the activation after it
            (None: the MLP's), also in other heads with such a map ("transform"). RoBERTa and Longformer always have
            "gelu" there.
        classifier_head, classifier_activation: "linear"; "dense": a layer of `hidden_size` and this activation come
            first; or "transform": a linear map, `lm_transform_activation` and a norm come first, as in ModernBERT.
        classifier_pooling: the token that represents a sequence: "first", "last" or "mean"; None: "last" if causal,
            otherwise "mean".
        question_answering_head: "linear"; "residual_mlp", as in transformers' BigBird; or "transform", as above.
        question_answering_excludes_question: whether answers never begin or end in the question, as in transformers'
            BigBird.

    Raises:
        ConfigurationError: fields that exclude each other; the message lists what is allowed.

    Sources: Beltagy et al. (arXiv:2004.05150); Zaheer et al. (arXiv:2007.14062).

    >>> config = SparseTransformerConfig.longformer(num_hidden_layers=2, attention_window=[64, 128])
    >>> [layer["left"] for layer in config.attention_pattern]
    [32, 64]
    """

    model_type = "sparse_transformer"
    papers = ("2004.05150", "2007.14062")
    can_shard_sequence = True
    # scores of a head in a layer, for n tokens
    attention_cost = "the pairs of attention_pattern, such as n · (left + right + 1) for a band; without a pattern n²"

    rope_parameters: RopeParameters | dict | None = None
    rope_theta_per_layer: list[float] | None = None

    @classmethod
    def longformer(
        cls,
        attention_window: int | Sequence[int] = 512,
        attention_dilation: int | Sequence[int] | Sequence[Sequence[int]] = 1,
        num_dilated_heads: int | None = None,
        is_causal: bool = False,
        **fields: Any,
    ) -> "SparseTransformerConfig":
        """Return Longformer-base: RoBERTa's layout, a window per layer, global tokens with projections of their own.

        Args:
            attention_window: how many keys around itself a query attends to, both sides together, an even number; a
                list gives one per layer.
            attention_dilation: step between them, 1 = none; a list gives one per layer, or a list with one per head.
            num_dilated_heads: how many of the last heads of a layer are dilated, if it has one step; None: all.
            is_causal: whether it is a language model: the left half of the window, no global tokens by default,
                pre-norm, rotary positions.

        Source: Beltagy et al. (arXiv:2004.05150), section 3, and the sizes of longformer-base-4096.
        """
        preset: dict[str, Any] = {
            **({} if is_causal else BERT_DROPOUT),
            "vocab_size": 50_265,
            "max_position_embeddings": 4096,
            "position_offset": 2,
            "type_vocab_size": 1,
            "norm_eps": 1e-5,
            "global_tokens": "auto",
            "global_projections": True,
            "classifier_head": "dense",
            "classifier_pooling": "first",
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "sep_token_id": 2,
        }
        if is_causal:
            preset |= {**CAUSAL, "global_tokens": None, "global_projections": False, "classifier_pooling": None}
            preset |= {"position_offset": 0}
        fields = {**preset, **fields}
        num_layers, num_heads = fields.get("num_hidden_layers", 12), fields.get("num_attention_heads", 12)
        windows = _per_layer("attention_window", attention_window, num_layers)
        steps = _per_layer("attention_dilation", attention_dilation, num_layers)
        num_dilated = num_heads if num_dilated_heads is None else num_dilated_heads
        if type(num_dilated) is not int or not 0 <= num_dilated <= num_heads:
            raise ConfigurationError(
                f"num_dilated_heads={shown(num_dilated_heads)}; it must be None, or 0 to {num_heads}, the number of "
                "heads."
            )
        patterns = []
        for window, step in zip(windows, steps, strict=True):
            is_single = isinstance(step, int)
            head_steps = [1] * (num_heads - num_dilated) + [step] * num_dilated if is_single else list(step)
            patterns.append(_window(band_of_window(window).left, head_steps, num_heads))
        return cls(**{"attention_pattern": patterns, **fields})

    @classmethod
    def longformer_char_lm(cls, size: str = "small", phase: int = 1, **fields: Any) -> "SparseTransformerConfig":
        """Return Longformer's character language model: pre-norm, relative sinusoids, growing windows, two dilated
        heads.

        Args:
            size: "small" (12 layers, 41M parameters) or "large" (30 layers, 102M), both of width 512 with 8 heads.
            phase: 1 to 5. Each doubles the windows; training starts phase p from the weights of p - 1.

        The windows in the paper's table are garbled. We understand them as powers of two, from 32 tokens at the bottom
        to 512 at the top in phase 1, and from 512 to 8,192 in phase 5. If they do not divide the layers evenly, the
        larger windows get more layers: the small model's average is then 229, which matches the paper's control with
        equal windows of 230. The table's dilations 0 to 3 count gaps: steps of 1 to 4. Source: Beltagy et al.
        (arXiv:2004.05150), section 4 and appendix B.
        """
        if size not in ("small", "large") or phase not in range(1, 6):
            raise ConfigurationError(
                f"size={shown(size)}, phase={phase}; size must be 'small' or 'large', and phase must be 1 to 5."
            )
        num_layers = fields.get("num_hidden_layers", 12 if size == "small" else 30)
        num_heads = fields.get("num_attention_heads", 8)
        # layers of the table: 0-5, 6-7, 8-9, 10-11 of 12, and 0-14, 15-19, 20-24, 25-29 of 30
        borders = (1 / 2, 2 / 3, 5 / 6)
        windows = [32 * 2 ** (power + phase - 1) for power in range(5) for _ in range((num_layers + power) // 5)]
        patterns = []
        for layer, window in enumerate(windows):
            step = 1 + sum(layer >= round(border * num_layers) for border in borders)
            patterns.append(_window(window, [1] * (num_heads - 2) + [step] * 2, num_heads).causal())
        preset = {
            "vocab_size": 256,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "is_causal": True,
            "norm_position": "pre",
            "norm_eps": 1e-5,
            "embedding_norm": False,
            "position_embedding_type": "relative",
            "max_position_embeddings": 32_256,
            "attention_bias": False,
            "attention_output_bias": False,
            "lm_head_transform": False,
            "lm_head_bias": True,
            "embedding_dropout": 0.2 if size == "small" else 0.4,
            "hidden_dropout": 0.2 if size == "small" else 0.4,
            "pad_token_id": None,
        }
        return cls(**{"attention_pattern": patterns, **preset, **fields})

    @classmethod
    def bigbird_itc(
        cls,
        block_tokens: int = 64,
        num_random_blocks: int = 3,
        plan: str = "authors",
        seed: int = 0,
        is_causal: bool = False,
        **fields: Any,
    ) -> "SparseTransformerConfig":
        """Return BigBird-ITC base: three blocks around the query, the first and the last block global, and random
        blocks.

        Args:
            plan: how random blocks are drawn: "authors", "transformers" or "seeded"; see `patterns.bigbird`. The causal
                form, which no paper has, is always seeded.
            seed: seed of the random blocks; the authors use 0.

        Source: Zaheer et al. (arXiv:2007.14062), sections 2 and E; sizes of bigbird-roberta-base.
        """
        preset: dict[str, Any] = {
            **({} if is_causal else BERT_DROPOUT),
            "vocab_size": 50_358,
            "hidden_act": "gelu_new",
            "type_vocab_size": 2,
            "max_position_embeddings": 4096,
            "classifier_head": "dense",
            "classifier_activation": "gelu_new",
            "classifier_pooling": "first",
            "question_answering_head": "residual_mlp",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "sep_token_id": 66,
        }
        if is_causal:
            preset |= {**CAUSAL, "type_vocab_size": 0, "classifier_pooling": None}
        pattern = bigbird(block_tokens, num_random_blocks, seed, "seeded" if is_causal else plan, is_causal)
        return cls(**{"attention_pattern": pattern, **preset, **fields})

    @classmethod
    def block_local(cls, block_tokens: int = 512, is_causal: bool = False, **fields: Any) -> "SparseTransformerConfig":
        """Return a model in which tokens attend to their own block; survey (arXiv:2106.04554), section 4.1.1."""
        return cls(**{"attention_pattern": BlockLocal(block_tokens), **(CAUSAL if is_causal else {}), **fields})

    @classmethod
    def strided(cls, stride: int = 128, is_causal: bool = True, **fields: Any) -> "SparseTransformerConfig":
        """Return the strided Sparse Transformer: the last `stride` tokens, and every `stride`-th of all.

        Every head attends to both (the "merged" form). Source: Child et al. (arXiv:1904.10509), section 4.2.
        """
        pattern = Band(stride, stride) | Strided(stride)
        return cls(**{"attention_pattern": pattern, **(CAUSAL if is_causal else {}), **fields})

    @classmethod
    def sliding(
        cls, left: int = 256, right: int | None = None, is_causal: bool = False, **fields: Any
    ) -> "SparseTransformerConfig":
        """Return a model in which tokens attend to `left` tokens before and `right` (default: as many) after them."""
        pattern = Band(left, 0 if is_causal else left if right is None else right)
        return cls(**{"attention_pattern": pattern, **(CAUSAL if is_causal else {}), **fields})

    def readable_patterns(self) -> tuple[Pattern | None, ...]:
        """Return the pattern of each layer, global tokens included, for `PatternCache`.

        Raises:
            ConfigurationError: global tokens without fixed positions, or with keys of their own.
        """
        patterns = config_patterns(self.attention_pattern, self, DECODER) or ()
        rule = None if self.global_tokens == "auto" else self.global_tokens
        positions = (0,) if rule == "first" else rule.get("positions") if isinstance(rule, Mapping) else None
        if self.global_projections or (rule is not None and positions is None):
            raise ConfigurationError(
                f"PatternCache keeps a band and the first tokens, but this model has global_tokens={shown(rule)} and "
                f"global_projections={self.global_projections}. Generate with the default cache, which keeps all "
                "tokens."
            )
        if positions is None:
            return patterns
        return tuple(None if pattern is None else pattern | GlobalTokens(positions) for pattern in patterns)

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields; write the pattern in JSON types."""
        check_fields(self, CHOICES)
        self.check_head_sizes()
        if self.num_attention_heads % self.key_value_heads or (
            self.key_value_heads != self.num_attention_heads and self.global_projections
        ):
            raise ConfigurationError(
                f"num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}, and equal it if global_projections=True."
            )
        thetas = self.rope_theta_per_layer
        if thetas is not None and len(thetas) != self.num_hidden_layers:
            raise ConfigurationError(
                f"rope_theta_per_layer lists {len(thetas)} bases for {self.num_hidden_layers} layers; give one for "
                "each layer."
            )
        check_attention(self)
        write_pattern(self)


__all__ = ["SparseTransformerConfig"]
