"""The table of a model type of transformers: its names, heads and config fields, and what we call them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Names = Mapping[str, str | tuple[str, ...]]

# the prefix of the backbone in our heads
OUR_PREFIX = "model."
# fields that every config has
COMMON_FIELDS = (
    "vocab_size",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "sep_token_id",
    "tie_word_embeddings",
    "id2label",
    "label2id",
    "problem_type",
    "use_cache",
)
# fields that do not affect the function that a model computes
NO_FUNCTION = {
    "architectures",
    "attn_implementation",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "experts_implementation",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "is_encoder_decoder",
    "model_type",
    "name_or_path",
    "_name_or_path",
    "onnx_export",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
}


@dataclass(frozen=True)
class Counterpart:
    """The table between a model type of transformers and one of our families; `conversion` applies it both ways.

    "Theirs" is of transformers, "ours" of this package. A model type may have several tables; `registry` says which
    family is the default.

    Attributes:
        model_type: their model type.
        family: our model type.
        prefix: prefix of the backbone in their heads; the backbone alone has none.
        names: their modules or parameters in the backbone → ours; * stands for a number. A tuple: theirs is ours
            concatenated along the first dimension.
        heads: the same for what each head adds; names inside their backbone include their prefix.
        fields: their config fields → ours of equal value; a tuple: all of these have the same value.
        to_ours: (their config, head, parity) → further fields of our config.
        to_theirs: (our config) → further fields of their config; raises ConfigurationError for what their config cannot
            express. None: the model type is only a source.
        requested_fields: (our config, `ConversionRequest`) → the fields of this family for the requested pattern and
            global tokens; None: the fields of the sparse families.
        left_behind: their modules that our family lacks.
        recomputed: their parameters that are computed by a formula.
        copies: their parameters → the parameter that they are equal to.
        unused: their parameters that are saved but not used → the parameter that is used instead.
        optional: our parameters → our config field; without this field they are left behind.
        doubled: our modules → our modules that they are initialized from if the source lacks them.
        started: our modules or parameters that the source lacks and that keep their initial values.
        warning: (our config) → what users of our model should know; empty: nothing.
        warning_there: (their config) → what users of their model should know if it was made from ours; empty: nothing.
        deviations: our config fields in which their model differs → how it differs.
        ignored_fields: their config fields that `lost_fields` ignores, because `to_ours` uses them or no model does.
        two_labels: heads whose class sets num_labels to 2, whatever the config says.
        tokens_alike: (our config, theirs) → the longest input in tokens on which both agree; None: any length.
        mechanisms: mechanisms of our layers that a caller may request.
        is_dense: whether all tokens attend to each other; the conversion makes such models sparse and long.
    """

    model_type: str
    family: str
    prefix: str
    names: Names
    heads: Mapping[str, Names]
    fields: Mapping[str, str | tuple[str, ...]]
    to_ours: Callable[[Any, str, bool], dict[str, Any]]
    to_theirs: Callable[[Any], dict[str, Any]] | None = None
    requested_fields: Callable[[Any, Any], dict[str, Any]] | None = None
    left_behind: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    doubled: Mapping[str, str] = field(default_factory=dict)
    started: tuple[str, ...] = ()
    warning: Callable[[Any], str] | None = None
    warning_there: Callable[[Any], str] | None = None
    deviations: Mapping[str, str] = field(default_factory=dict)
    ignored_fields: tuple[str, ...] = ()
    two_labels: tuple[str, ...] = ()
    tokens_alike: Callable[[Any, Any], int] | None = None
    mechanisms: tuple[str, ...] = ()
    is_dense: bool = False

    def all_names(self, head: str) -> Names:
        """Return the names for a head, with the prefixes of the backbone."""
        own, ours = self.prefix_of(head), self.our_prefix_of(head)
        prefixed = {own + theirs: _prefixed(ours, names) for theirs, names in self.names.items()}
        return {**prefixed, **self.heads[head]}

    def prefix_of(self, head: str) -> str:
        """Return the prefix of their backbone in a head; empty for the backbone alone."""
        return "" if head == "Model" else self.prefix

    def our_prefix_of(self, head: str) -> str:
        """Return the prefix of our backbone in a head; empty for the backbone alone."""
        return OUR_PREFIX if self.prefix_of(head) else ""

    def with_prefix(self, names: Iterable[str], head: str) -> tuple[str, ...]:
        """Return names of the backbone twice: as they are, and with the prefix that they have in a head."""
        listed = tuple(names)
        return (*listed, *(self.prefix_of(head) + name for name in listed))


def separator_of(config: Any) -> int | None:
    """Return the separator of a config; if it has none, the end token, as in RoBERTa's and BART's vocabularies."""
    separator = getattr(config, "sep_token_id", None)
    return config.eos_token_id if separator is None else separator


def _prefixed(prefix: str, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return prefix + names if isinstance(names, str) else tuple(prefix + name for name in names)
