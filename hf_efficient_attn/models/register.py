"""Register every family with the Auto classes of transformers. A new family is one more module in `FAMILIES`."""

from types import ModuleType
from typing import Any

import transformers

from hf_efficient_attn.integration.saving import name_classes
from hf_efficient_attn.models.adaptive_span import modeling_adaptive_span
from hf_efficient_attn.models.bp_seq2seq import modeling_bp_seq2seq
from hf_efficient_attn.models.bp_transformer import modeling_bp_transformer
from hf_efficient_attn.models.compressed_transformer import modeling_compressed_transformer
from hf_efficient_attn.models.efficient_reformer import modeling_efficient_reformer
from hf_efficient_attn.models.etc_transformer import modeling_etc_transformer
from hf_efficient_attn.models.routing_transformer import modeling_routing_transformer
from hf_efficient_attn.models.simplified_transformer import modeling_simplified_transformer
from hf_efficient_attn.models.sparse_seq2seq import modeling_sparse_seq2seq
from hf_efficient_attn.models.sparse_transformer import modeling_sparse_transformer
from hf_efficient_attn.models.star_transformer import modeling_star_transformer

FAMILIES: tuple[ModuleType, ...] = (
    modeling_simplified_transformer,
    modeling_sparse_transformer,
    modeling_sparse_seq2seq,
    modeling_adaptive_span,
    modeling_efficient_reformer,
    modeling_routing_transformer,
    modeling_star_transformer,
    modeling_etc_transformer,
    modeling_bp_transformer,
    modeling_bp_seq2seq,
    modeling_compressed_transformer,
)
HEADS = (
    "CausalLM",
    "MaskedLM",
    "MultipleChoice",
    "QuestionAnswering",
    "SequenceClassification",
    "TokenClassification",
)
# heads whose class has another name than their Auto class
RENAMED_HEADS = {"ConditionalGeneration": "Seq2SeqLM"}

LANGUAGE_MODELS = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")


def register_families() -> None:
    """Register each family's config, backbone and heads; calling it again changes nothing."""
    for family in FAMILIES:
        classes = auto_classes(family)
        config = classes["AutoModel"].config_class
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        for name, model_class in classes.items():
            getattr(transformers, name).register(config, model_class, exist_ok=True)
        trained = [classes[name] for name in LANGUAGE_MODELS if name in classes]
        # if a family has two of them, the one to train depends on the config
        if len(trained) == 1:
            transformers.AutoModelForPreTraining.register(config, trained[0], exist_ok=True)
        name_classes(**classes)


def auto_classes(family: ModuleType) -> dict[str, Any]:
    """Return the classes of a family, the backbone first, by the names of the Auto classes that load them."""
    classes = {name: getattr(family, name) for name in family.__all__}
    backbone = next(cls for name, cls in classes.items() if name.endswith("Model") and "PreTrained" not in name)
    prefix = backbone.__name__.removesuffix("Model")
    return {"AutoModel": backbone} | {
        f"AutoModelFor{auto_name}": classes[f"{prefix}For{head}"]
        for head, auto_name in [*zip(HEADS, HEADS, strict=True), *RENAMED_HEADS.items()]
        if f"{prefix}For{head}" in classes
    }
