"""Nyströmformer: BERT's layout, positions from the third row on, a convolution over the values of each head.

The model of transformers reads texts of exactly `segment_means_seq_len` tokens, a multiple of its landmarks; one with
as many landmarks as that, by default 64, has full attention at any length. Without `parity` such a model has its
landmarks here; with it, as many as positions, which is full attention, too. `parity` also divides the start of the
iteration for the inverse as transformers does, so that batch mates change outputs. In training attention weights are
dropped here, and there they are not.
"""

from typing import Any

from hf_efficient_attn.convert.counterpart import Counterpart, separator_of
from hf_efficient_attn.convert.tables import bert_layout as bert
from hf_efficient_attn.errors import ConfigurationError

# a constant of their code
ROWS_BEFORE_POSITIONS = 2


def to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return what no field of theirs says by itself.

    Raises:
        ConfigurationError: segments of several lengths, with which transformers cannot build or run a model.
    """
    landmarks, tokens = config.num_landmarks, config.segment_means_seq_len
    if tokens % landmarks or config.inv_coeff_init_option:
        raise ConfigurationError(
            f"The nystromformer config says segment_means_seq_len={tokens}, num_landmarks={landmarks} and "
            f"inv_coeff_init_option={config.inv_coeff_init_option}, with which transformers computes nothing: "
            "landmarks must divide the length, and the option must be False."
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


def to_theirs(config: Any) -> dict[str, Any]:
    """Return their landmarks, and the longest texts that these divide.

    Raises:
        ConfigurationError: more landmarks than half a text has tokens, and fewer than a text.
    """
    longest, landmarks = config.max_position_embeddings, config.num_landmarks
    if not config.layers_with("nystrom"):
        # refused when fields are compared
        landmarks = 1
    tokens = max(landmarks, longest // landmarks * landmarks)
    if tokens == landmarks < longest:
        raise ConfigurationError(
            f"nystromformer models read texts of a multiple of num_landmarks={landmarks} tokens, and have full "
            f"attention if that is {landmarks}; of max_position_embeddings={longest} no other is left. Convert with "
            f"max_position_embeddings={2 * landmarks}."
        )
    return {"num_landmarks": landmarks, "segment_means_seq_len": tokens, "max_position_embeddings": longest}


def asked(config: Any, request: Any) -> dict[str, Any]:
    """Return the landmarks of a longer model whose source has full attention.

    Raises:
        ConfigurationError: a pattern, window or global projections, which no layer has.
    """
    for name in ("pattern", "attention_window", "global_projections"):
        if getattr(request, name) is not None:
            raise ConfigurationError(
                f"{name}={getattr(request, name)}: the layers of a Nyströmformer read landmarks, and follow no "
                f"pattern. Leave {name} out."
            )
    is_full = config.num_landmarks >= config.max_position_embeddings
    longer = request.max_position_embeddings
    return {"num_landmarks": max(longer, config.num_landmarks)} if is_full and longer is not None else {}


def warning_there(config: Any) -> str:
    """Return how long the texts of their model are."""
    if config.num_landmarks == config.segment_means_seq_len:
        return ""
    return (
        f"The nystromformer model reads texts of exactly segment_means_seq_len={config.segment_means_seq_len} tokens, "
        "without padding; of others it mixes rows, or fails."
    )


def tokens_alike(config: Any, theirs: Any) -> int:
    """Return the length of the texts that their model reads."""
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
    to_ours=to_ours,
    to_theirs=to_theirs,
    asked=asked,
    warning_there=warning_there,
    tokens_alike=tokens_alike,
    unused=bert.BERT_UNUSED,
    deviations={
        **bert.DEVIATIONS,
        "attention_dropout": "nystromformer drops no attention weights",
        "inverse_scale": "nystromformer divides by one number for all texts of a batch and all heads",
        "num_landmarks": "nystromformer has as many landmarks as positions where texts have full attention",
        "classifier_activation": "nystromformer has relu in multiple choice, and else the activation of the MLP",
    },
    two_labels=("QuestionAnswering",),
    ignored_fields=("inv_coeff_init_option", "max_position_embeddings", "num_landmarks", "segment_means_seq_len"),
)
