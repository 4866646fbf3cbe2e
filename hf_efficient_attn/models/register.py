"""Tell transformers' Auto classes about every family. A new family is one more module in `FAMILIES`."""

from types import ModuleType

import transformers

from hf_efficient_attn.models.adaptive_span import modeling_adaptive_span
from hf_efficient_attn.models.simplified_transformer import modeling_simplified_transformer
from hf_efficient_attn.models.sparse_seq2seq import modeling_sparse_seq2seq
from hf_efficient_attn.models.sparse_transformer import modeling_sparse_transformer

FAMILIES: tuple[ModuleType, ...] = (
    modeling_simplified_transformer,
    modeling_sparse_transformer,
    modeling_sparse_seq2seq,
    modeling_adaptive_span,
)
HEADS = (
    "CausalLM",
    "MaskedLM",
    "MultipleChoice",
    "QuestionAnswering",
    "SequenceClassification",
    "TokenClassification",
)
# heads whose class is not named as their Auto class
RENAMED_HEADS = {"ConditionalGeneration": "Seq2SeqLM"}


def register_families() -> None:
    """Register each family's config, backbone and heads; calling it again changes nothing."""
    for family in FAMILIES:
        classes = {name: getattr(family, name) for name in family.__all__}
        backbone = next(cls for name, cls in classes.items() if name.endswith("Model") and "PreTrained" not in name)
        config, prefix = backbone.config_class, backbone.__name__.removesuffix("Model")
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        transformers.AutoModel.register(config, backbone, exist_ok=True)
        for head, auto_name in [*zip(HEADS, HEADS, strict=True), *RENAMED_HEADS.items()]:
            if f"{prefix}For{head}" in classes:
                auto_class = getattr(transformers, f"AutoModelFor{auto_name}")
                auto_class.register(config, classes[f"{prefix}For{head}"], exist_ok=True)
