"""Tables of encoders that become an ETC or a compressed Transformer: BERT, RoBERTa, XLM-RoBERTa, and Nyströmformer.

BERT, RoBERTa and XLM-RoBERTa initialize a compressed Transformer, as in Nyströmformer's paper.

Everything except attention stays the same. Parameters of a mechanism other than the projections of queries, keys,
values and output get initial values. With these values, layers of "pattern" (without a pattern), "talking_heads" and
"collaborative_heads" compute what the source computes; other layers compute something else until they are trained
further. Linear attention gets random features, whose products equal those of softmax in expectation. Sources: Xiong et
al., "Nyströmformer" (arXiv:2102.03902), section 4.1; for the number of projected tokens, Wang et al., "Linformer"
(arXiv:2006.04768), section 5.1.

BERT, RoBERTa and XLM-RoBERTa initialize an ETC, as its authors initialized their large model.

Both inputs start from the same projections, norms and MLPs. Labels of distances replace absolute positions, so the
result computes something else until it is trained further. Source: Ainslie et al. (arXiv:2004.08483), section 4. The
authors do not say what they did with token types, which are kept here.

Nyströmformer: BERT's layout, positions from the third row on, and a convolution over the values of each head.

The model of transformers accepts texts of exactly `segment_means_seq_len` tokens, a multiple of the number of
landmarks. If both numbers are equal (64 by default), it has full attention at any length. Without `parity` such a model
uses landmarks here; with `parity` it gets one landmark per position, which is also full attention. `parity` also scales
the start of the iteration for the inverse as transformers does, so that outputs depend on the other examples of the
batch. In training, dropout applies to attention weights here, but not in transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hf_efficient_attn.convert.configs import ConversionRequest
from hf_efficient_attn.convert.counterpart import Counterpart, separator_of
from hf_efficient_attn.convert.tables import bert
from hf_efficient_attn.convert.tables.bert import BERT, ROBERTA, XLM_ROBERTA, check_encoder
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns.bands import band_of_window

DEFAULT = "nystrom"
# mechanisms that compute the attention of the source before training
EXACT = ("pattern", "talking_heads", "collaborative_heads")
# all mechanisms except reused weights, whose layers have no queries and keys
MECHANISMS = (DEFAULT, "linformer", "linear", "memory_compressed", "prior", "residual_scores", *EXACT)
# Linformer's authors project texts of up to this many tokens to 128, and longer texts to 256
SHORT_TOKENS = 512
STARTED = (
    "length_maps.key_map",
    "length_maps.value_map",
    "features.vectors",
    "conv",
    "key_conv",
    "value_conv",
    "prior_weight",
    "prior_bias",
    "score_map",
    "weight_map",
    "mixing",
)


def requested_of_compressed(config: Any, request: ConversionRequest) -> dict[str, Any]:
    """Return the fields of the requested mechanisms, with the pattern or window for those that follow one.

    Raises:
        ConfigurationError: `parity` with mechanisms that compute something else, or global projections.
    """
    mechanism = DEFAULT if request.mechanism is None else request.mechanism
    listed = set(mechanism) if isinstance(mechanism, list) else {mechanism}
    if request.parity and not listed <= set(EXACT):
        raise ConfigurationError(
            f"parity=True: {', '.join(sorted(listed - set(EXACT)))} layers cannot compute what the source computes. "
            f"These layers can: {', '.join(EXACT)}. Leave parity (--parity) out."
        )
    if request.global_projections is not None:
        raise ConfigurationError(
            f"global_projections={request.global_projections}: a compressed_transformer has no global tokens. Leave "
            "global_projections out."
        )
    fields: dict[str, Any] = {"mechanism": mechanism, "attention_pattern": request.pattern}
    if request.attention_window is not None:
        fields["attention_pattern"] = band_of_window(request.attention_window)
    if "linear" in listed:
        fields["feature_map"] = "positive_random"
    if "linformer" in listed:
        longest = request.max_position_embeddings or config.max_position_embeddings
        fields["projected_tokens"] = min(longest, 128 if longest <= SHORT_TOKENS else 256)
    return fields


def warning(config: Any) -> str:
    """Return a warning that the model needs training; empty if it computes what its source computes."""
    others = {config.mechanism_of_layer(layer) for layer in range(config.num_hidden_layers)} - set(EXACT)
    if not others:
        return ""
    return (
        f"The {', '.join(sorted(others))} layers start with the weights of the source but compute something else. "
        "Train the model further, on masked tokens, before you fine-tune it."
    )


def _as_compressed(source: Counterpart, to_ours: Callable[[Any, str, bool], dict[str, Any]]) -> Counterpart:
    """Return the table that converts the model type of `source` to a compressed Transformer."""
    return replace(
        source,
        family="compressed_transformer",
        # the attention of the source; `requested_of_compressed` replaces it
        to_ours=lambda config, head, parity: {**to_ours(config, head, parity), "mechanism": "pattern"},
        requested_fields=requested_of_compressed,
        mechanisms=MECHANISMS,
        started=tuple(f"layers.*.self_attn.{name}" for name in STARTED),
        warning=warning,
        is_dense=False,
    )


BERT_AS_COMPRESSED = _as_compressed(BERT, bert.bert_to_ours)
ROBERTA_AS_COMPRESSED = _as_compressed(ROBERTA, bert.roberta_to_ours)
XLM_ROBERTA_AS_COMPRESSED = _as_compressed(XLM_ROBERTA, bert.roberta_to_ours)


POSITIONS = "embeddings.position_embeddings"
LABELS = ("vectors", "biases")
# ids for global tokens: the authors use 1, the first unused token of BERT's vocabulary, for sentences
UNUSED_TOKENS = (1, 0)
WARNING = (
    "The ETC starts with the weights of the source but computes something else: labels of distances replace positions. "
    "Train it further, on masked tokens, before you fine-tune it."
)


def to_ours_of_bert(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return the fields of our config that are not simply copied from BERT's.

    Raises:
        ConfigurationError: `parity`, or what `check_encoder` refuses.
    """
    check_encoder(config)
    token = next(each for each in UNUSED_TOKENS if each != config.pad_token_id)
    return {**_fields(config, parity, bert.classifier_fields(config)), "global_token_id": token}


def to_ours_of_roberta(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return the fields of our config that are not simply copied from RoBERTa's.

    Raises:
        ConfigurationError: `parity`, no token for the start of a text, or what `bert.roberta_to_ours` refuses.
    """
    own = bert.roberta_to_ours(config, head, parity)
    # its vocabulary has no unused token; the token at the start of a text represents the whole text
    token = config.bos_token_id
    if token is None or token == config.pad_token_id:
        raise ConfigurationError(
            f"The {config.model_type} config has bos_token_id={token} and pad_token_id={config.pad_token_id}, but "
            "global tokens get the id bos_token_id. Set it to a token that is not padding."
        )
    del own["position_offset"]
    return {**_fields(config, parity, own), "global_token_id": token}


def _fields(config: Any, parity: bool, own: dict[str, Any]) -> dict[str, Any]:
    if parity:
        raise ConfigurationError(
            f"parity=True: an etc_transformer cannot compute what a {config.model_type} computes, because it has no "
            "positions. Leave parity (--parity) out."
        )
    # each global token stands for a chunk of the text, and the first is not more important than the others
    return {**own, "classifier_pooling": "mean", "long_token_type": 0}


def requested_of_etc(config: Any, request: ConversionRequest) -> dict[str, Any]:
    """Return the fields for the requested band or pattern, and for projections that both inputs share.

    Raises:
        ConfigurationError: an odd window.
    """
    fields: dict[str, Any] = {} if request.pattern is None else {"attention_pattern": request.pattern}
    if request.attention_window is not None:
        fields["local_radius"] = band_of_window(request.attention_window).left
    if request.global_projections is False:
        fields |= {"share_qkv_projections": True, "share_output_projection": True}
    return fields


def _names() -> dict[str, str]:
    """Return BERT's names without positions; its attention projections become those of long tokens."""
    attention = {f"layers.*.self_attn.{name}_proj": f"layers.*.self_attn.long_side.{name}_proj" for name in "qkv"}
    return {theirs: attention.get(ours, ours) for theirs, ours in bert.NAMES.items() if theirs != POSITIONS}


def _doubled() -> Mapping[str, str]:
    """Return the modules that are initialized from others: those of global tokens, and "other" keys and values."""
    own, long = "layers.*.self_attn.", "layers.*.self_attn.long_side."
    maps = {f"{own}global_side.{name}_proj": f"{long}{name}_proj" for name in "qkv"}
    other = {
        f"{own}{side}_side.other_{name}_proj": f"{long}{name}_proj" for side in ("long", "global") for name in "kv"
    }
    return {
        **maps,
        **other,
        f"{own}global_o_proj": f"{own}o_proj",
        "layers.*.global_attention_norm": "layers.*.attention_norm",
        "embeddings.global_norm": "embeddings.norm",
    }


def _as_etc(source: Counterpart, to_ours: Callable[[Any, str, bool], dict[str, Any]]) -> Counterpart:
    """Return the table that converts the model type of `source` to an ETC."""
    return replace(
        source,
        family="etc_transformer",
        names=_names(),
        to_ours=to_ours,
        requested_fields=requested_of_etc,
        left_behind=(*source.left_behind, POSITIONS),
        doubled=_doubled(),
        started=tuple(f"layers.*.self_attn.{which}_labels.{kind}" for which in ("long", "global") for kind in LABELS),
        warning=lambda config: WARNING,
    )


BERT_AS_ETC = _as_etc(BERT, to_ours_of_bert)
ROBERTA_AS_ETC = _as_etc(ROBERTA, to_ours_of_roberta)
XLM_ROBERTA_AS_ETC = _as_etc(XLM_ROBERTA, to_ours_of_roberta)


# hardcoded in transformers
ROWS_BEFORE_POSITIONS = 2


def nystromformer_to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return the fields of our config that are not simply copied from theirs.

    Raises:
        ConfigurationError: landmarks that do not divide the length, or `inv_coeff_init_option`, with which transformers
            cannot build or run a model.
    """
    landmarks, tokens = config.num_landmarks, config.segment_means_seq_len
    if tokens % landmarks or config.inv_coeff_init_option:
        raise ConfigurationError(
            f"The nystromformer config has segment_means_seq_len={tokens}, num_landmarks={landmarks} and "
            f"inv_coeff_init_option={config.inv_coeff_init_option}, with which transformers cannot compute outputs: "
            "num_landmarks must divide segment_means_seq_len, and inv_coeff_init_option must be False."
        )
    is_full = parity and landmarks == tokens
    activation = "relu" if head == "MultipleChoice" else config.hidden_act
    return {
        "mechanism": "nystrom",
        "num_landmarks": config.max_position_embeddings if is_full else landmarks,
        "inverse_scale": "batch" if parity else "head",
        "position_offset": ROWS_BEFORE_POSITIONS,
        "max_position_embeddings": config.max_position_embeddings,
        "sep_token_id": separator_of(config),
        **bert.classifier_fields(config, activation, has_own_dropout=False),
    }


def nystromformer_to_theirs(config: Any) -> dict[str, Any]:
    """Return the number of landmarks and the longest length that is a multiple of it.

    Raises:
        ConfigurationError: more landmarks than half the longest text has tokens, but fewer than the whole text has.
    """
    longest, landmarks = config.max_position_embeddings, config.num_landmarks
    if not config.layers_with("nystrom"):
        # `their_config` refuses such a config when it compares the fields
        landmarks = 1
    tokens = max(landmarks, longest // landmarks * landmarks)
    if tokens == landmarks < longest:
        raise ConfigurationError(
            f"Texts of nystromformer models must have a multiple of num_landmarks={landmarks} tokens, and those of "
            f"{landmarks} tokens get full attention. With max_position_embeddings={longest} no other text is possible. "
            f"Convert with max_position_embeddings={2 * landmarks}."
        )
    return {"num_landmarks": landmarks, "segment_means_seq_len": tokens, "max_position_embeddings": longest}


def requested_of_nystromformer(config: Any, request: Any) -> dict[str, Any]:
    """Return more landmarks for a longer model if its source has full attention.

    Raises:
        ConfigurationError: a pattern, window or global projections, which no layer has.
    """
    for name in ("pattern", "attention_window", "global_projections"):
        if getattr(request, name) is not None:
            raise ConfigurationError(
                f"{name}={getattr(request, name)}: the layers of a Nyströmformer attend to landmarks and have no "
                f"pattern. Leave {name} out."
            )
    is_full = config.num_landmarks >= config.max_position_embeddings
    longer = request.max_position_embeddings
    return {"num_landmarks": max(longer, config.num_landmarks)} if is_full and longer is not None else {}


def warning_there(config: Any) -> str:
    """Return a warning on the only length that their model accepts; empty if it has full attention."""
    if config.num_landmarks == config.segment_means_seq_len:
        return ""
    return (
        f"The nystromformer model takes texts of exactly segment_means_seq_len={config.segment_means_seq_len} tokens, "
        "without padding. With others it mixes rows, or fails."
    )


def tokens_alike(config: Any, theirs: Any) -> int:
    """Return the length of the texts that their model accepts, in tokens."""
    return int(min(theirs.segment_means_seq_len, theirs.max_position_embeddings))


NYSTROMFORMER = Counterpart(
    model_type="nystromformer",
    family="compressed_transformer",
    prefix="nystromformer.",
    names={**bert.NAMES, "encoder.layer.*.attention.self.conv": "layers.*.self_attn.conv"},
    heads={
        "Model": {},
        "MaskedLM": bert.BERT_LM_HEAD,
        "SequenceClassification": bert.ROBERTA_CLASSIFIER,
        "TokenClassification": bert.CLASSIFIER,
        "QuestionAnswering": bert.ANSWER,
        "MultipleChoice": {"pre_classifier": "classifier.dense", **bert.LABELS},
    },
    fields={**bert.FIELDS, "conv_kernel_size": "conv_kernel_size"},
    to_ours=nystromformer_to_ours,
    to_theirs=nystromformer_to_theirs,
    requested_fields=requested_of_nystromformer,
    warning_there=warning_there,
    tokens_alike=tokens_alike,
    unused=bert.BERT_UNUSED,
    deviations={
        **bert.DEVIATIONS,
        "attention_dropout": "nystromformer has no dropout of attention weights",
        "inverse_scale": "nystromformer divides by one number for all texts of a batch and all heads",
        "num_landmarks": "with full attention nystromformer has one landmark per position",
        "classifier_activation": "nystromformer has relu in multiple choice, and the activation of the MLP elsewhere",
    },
    two_labels=("QuestionAnswering",),
    ignored_fields=("inv_coeff_init_option", "max_position_embeddings", "num_landmarks", "segment_means_seq_len"),
)
