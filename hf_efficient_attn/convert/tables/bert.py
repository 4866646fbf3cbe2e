"""BERT: dense; becomes sparse and long."""

from typing import Any

from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.tables import bert_layout as bert
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown


def check_encoder(config: Any) -> None:
    """Raise ConfigurationError for a decoder, or for positions relative to each other, which older configs may have."""
    kind = getattr(config, "position_embedding_type", "absolute")
    if config.is_decoder or kind != "absolute":
        raise ConfigurationError(
            f"The {config.model_type} config says is_decoder={config.is_decoder}, "
            f"position_embedding_type={shown(kind)}; "
            "encoders with absolute positions can be converted."
        )


def to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return what no field of theirs says by itself.

    Raises:
        ConfigurationError: see `check_encoder`.
    """
    check_encoder(config)
    return {"max_position_embeddings": config.max_position_embeddings, **bert.classifier_fields(config)}


BERT = Counterpart(
    model_type="bert",
    family="sparse_transformer",
    prefix="bert.",
    names=bert.NAMES,
    heads={
        "Model": {},
        "MaskedLM": bert.BERT_LM_HEAD,
        "SequenceClassification": {"bert.pooler.dense": "classifier.dense", **bert.LABELS},
        "TokenClassification": bert.CLASSIFIER,
        "QuestionAnswering": bert.ANSWER,
        "MultipleChoice": {"bert.pooler.dense": "classifier.dense", **bert.LABELS},
    },
    fields=bert.FIELDS,
    to_ours=to_ours,
    left_behind=("pooler.dense", "cls.seq_relationship"),
    unused=bert.BERT_UNUSED,
    ignored_fields=(
        "add_cross_attention",
        "classifier_dropout",
        "is_decoder",
        "max_position_embeddings",
        "position_embedding_type",
    ),
    is_dense=True,
)
