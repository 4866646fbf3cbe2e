"""All model types that can be converted, and the families that each can become."""

from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.tables.bart import BART, LED, MARIAN, PEGASUS
from hf_efficient_attn.convert.tables.bert import BERT, LONGFORMER, MODERNBERT, ROBERTA, XLM_ROBERTA
from hf_efficient_attn.convert.tables.big_bird import BIG_BIRD, BIGBIRD_PEGASUS
from hf_efficient_attn.convert.tables.lifts import (
    BERT_AS_COMPRESSED,
    BERT_AS_ETC,
    NYSTROMFORMER,
    ROBERTA_AS_COMPRESSED,
    ROBERTA_AS_ETC,
    XLM_ROBERTA_AS_COMPRESSED,
    XLM_ROBERTA_AS_ETC,
)
from hf_efficient_attn.convert.tables.reformer import REFORMER
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown

# model type → the table of the family that it becomes by default
COUNTERPARTS: dict[str, Counterpart] = {
    counterpart.model_type: counterpart
    for counterpart in (
        BART,
        BERT,
        BIGBIRD_PEGASUS,
        BIG_BIRD,
        LED,
        LONGFORMER,
        MARIAN,
        MODERNBERT,
        NYSTROMFORMER,
        PEGASUS,
        REFORMER,
        ROBERTA,
        XLM_ROBERTA,
    )
}
# (model type, family) → the table of a further family, which the weights of the source only initialize
LIFTS: dict[tuple[str, str], Counterpart] = {
    (table.model_type, table.family): table
    for table in (
        BERT_AS_COMPRESSED,
        BERT_AS_ETC,
        ROBERTA_AS_COMPRESSED,
        ROBERTA_AS_ETC,
        XLM_ROBERTA_AS_COMPRESSED,
        XLM_ROBERTA_AS_ETC,
    )
}
FAMILIES = ("compressed_transformer", "efficient_reformer", "sparse_seq2seq", "sparse_transformer")
# head → the Auto class that loads it; the backbone counts as a head
AUTO_CLASSES = {
    "Model": "AutoModel",
    "MaskedLM": "AutoModelForMaskedLM",
    "CausalLM": "AutoModelForCausalLM",
    "SequenceClassification": "AutoModelForSequenceClassification",
    "TokenClassification": "AutoModelForTokenClassification",
    "QuestionAnswering": "AutoModelForQuestionAnswering",
    "MultipleChoice": "AutoModelForMultipleChoice",
    "ConditionalGeneration": "AutoModelForSeq2SeqLM",
}


def check_source(model_type: str) -> None:
    """Raise ConfigurationError for a model type that cannot be converted."""
    if model_type in lifted_families() and model_type not in FAMILIES:
        raise ConfigurationError(
            f"{model_type} models are made by convert and cannot be converted again. Change the fields of their "
            "config instead: AutoModel.from_pretrained(folder, local_radius=...)."
        )
    if model_type not in FAMILIES and model_type not in COUNTERPARTS:
        raise ConfigurationError(
            f"Models of model_type {shown(model_type)} cannot be converted, only models of "
            f"{', '.join(sorted([*COUNTERPARTS, *FAMILIES]))}. For other models, hea.sparsify(model, pattern) sets a "
            "sparse pattern and keeps their type."
        )


def table_of(model_type: str, target: str | None = None) -> Counterpart | None:
    """Return the table that converts a model type to `target`; None: the model type is one of our families.

    target: a model type; if `LIFTS` has no table for it, the default table of the source is returned.
    """
    return LIFTS.get((model_type, target or ""), COUNTERPARTS.get(model_type))


def lifted_families(model_type: str | None = None) -> list[str]:
    """Return the families that a model type (None: any type) can become besides its default family."""
    return sorted({family for source, family in LIFTS if model_type in (None, source)})


def resolve_target(source_type: str, to: str | None) -> str:
    """Return the model type that a source becomes: `to`, or by default the family that it belongs to.

    Raises:
        ConfigurationError: an unknown target, or one that the source cannot become.
    """
    family = source_type if source_type in FAMILIES else COUNTERPARTS[source_type].family
    further = lifted_families(source_type)
    targets = [
        family,
        *further,
        *sorted(name for name, each in COUNTERPARTS.items() if each.family == family and each.to_theirs),
    ]
    target = family if to is None else to
    if target not in targets:
        raise ConfigurationError(
            f"A {shown(source_type)} model cannot become {shown(to)}; it can become: {', '.join(targets)}."
        )
    return target


def head_of_class(name: str) -> str | None:
    """Return the head of a model class; None: it has no counterpart.

    >>> head_of_class("BertForPreTraining"), head_of_class("LongformerModel"), head_of_class("BertForSomething")
    ('MaskedLM', 'Model', None)
    """
    known = {
        "ForPreTraining": "MaskedLM",
        "LMHeadModel": "CausalLM",
        "WithLMHead": "CausalLM",
        "MTModel": "ConditionalGeneration",
    }
    known |= {f"For{head}": head for head in AUTO_CLASSES} | {"Model": "Model"}
    return next((head for ending, head in known.items() if name.endswith(ending)), None)


def resolve_head(head: str) -> str:
    """Return the head for the name of an Auto class, a model class or a head.

    >>> resolve_head("AutoModelForSeq2SeqLM"), resolve_head("MaskedLM")
    ('ConditionalGeneration', 'MaskedLM')

    Raises:
        ConfigurationError: none of these.
    """
    by_auto_class = {auto: name for name, auto in AUTO_CLASSES.items()}
    found = None
    if isinstance(head, str):
        found = by_auto_class.get(head) or (head if head in AUTO_CLASSES else head_of_class(head))
    if found is None:
        raise ConfigurationError(
            f"head={shown(head)} is unknown; it must be one of: {', '.join(AUTO_CLASSES.values())}."
        )
    return found
