"""Which classes of transformers the sweep tries: one of each model type and kind, found in the auto mappings."""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

CAUSAL, ENCODER, SEQ2SEQ, IMAGE = "causal", "encoder", "seq2seq", "image"
# a class that stands in several is tried as the first
MAPPINGS = {
    CAUSAL: "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    SEQ2SEQ: "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    ENCODER: "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    IMAGE: "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
TEXT_ENCODERS = "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES"
BASE = "MODEL_MAPPING_NAMES"


@dataclass(frozen=True)
class Candidate:
    """A class to try: its model type, how it is used, and its name."""

    model_type: str
    kind: str
    name: str

    @property
    def model_class(self) -> Any:
        """Return the class."""
        return getattr(transformers, self.name)

    @property
    def config_class(self) -> Any:
        """Return the class of its config."""
        return self.model_class.config_class or getattr(transformers, CONFIG_MAPPING_NAMES[self.model_type])


def candidates() -> list[Candidate]:
    """Return all classes to try, sorted by kind and name; types without a head of these kinds by their base model."""
    found: dict[str, Candidate] = {}
    types = set()
    for kind, mapping in MAPPINGS.items():
        for model_type, name in _entries(mapping):
            found.setdefault(name, Candidate(model_type, kind, name))
            types.add(model_type)
    for mapping in (TEXT_ENCODERS, BASE):
        for model_type, name in _entries(mapping):
            if model_type not in types and _reads_text(name):
                found.setdefault(name, Candidate(model_type, ENCODER, name))
    return sorted(found.values(), key=lambda each: (each.kind, each.name))


def _entries(mapping: str) -> list[tuple[str, str]]:
    # the names of this package's families stand there, too
    names = {key: value for key, value in getattr(modeling_auto, mapping).items() if key in CONFIG_MAPPING_NAMES}
    return [(key, name) for key, value in names.items() for name in ([value] if isinstance(value, str) else value[:1])]


def _reads_text(name: str) -> bool:
    """Return whether a base model takes token ids and nothing else; composite ones are tried by their text parts."""
    model = getattr(transformers, name, None)
    if model is None or is_backend_dummy(model):
        return False
    config = model.config_class
    # many say so and read patches or features
    is_text = model.main_input_name == "input_ids" and "input_ids" in inspect.signature(model.forward).parameters
    return is_text and not getattr(config, "sub_configs", None)


def is_backend_dummy(model_class: Any) -> bool:
    """Return whether a class stands for one whose libraries are not installed."""
    return type(model_class).__name__ == "DummyObject"


def uses_interface(candidate: Candidate) -> bool:
    """Return whether transformers says that the class uses its attention interface."""
    importlib.import_module(candidate.model_class.__module__)
    return bool(candidate.model_class._can_set_attn_implementation())
