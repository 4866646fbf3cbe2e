"""Tell transformers' Auto classes about every family. A new family is one more line in `FAMILIES`."""

import transformers

from hf_efficient_attn.models import simplified_transformer

FAMILIES = (simplified_transformer,)
HEADS = (
    "CausalLM",
    "MaskedLM",
    "MultipleChoice",
    "QuestionAnswering",
    "SequenceClassification",
    "TokenClassification",
)


def register_families() -> None:
    """Register each family's config, backbone and heads; calling it again changes nothing."""
    for family in FAMILIES:
        classes = {name: getattr(family, name) for name in family.__all__}
        config = next(cls for name, cls in classes.items() if name.endswith("Config"))
        prefix = config.__name__.removesuffix("Config")
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        transformers.AutoModel.register(config, classes[f"{prefix}Model"], exist_ok=True)
        for head in HEADS:
            if f"{prefix}For{head}" in classes:
                auto_class = getattr(transformers, f"AutoModelFor{head}")
                auto_class.register(config, classes[f"{prefix}For{head}"], exist_ok=True)
