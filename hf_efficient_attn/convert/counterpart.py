"""What is known of a model type of transformers: its names, heads and config fields in those of our family."""

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
# fields that say how a model was made, or nothing about the function it computes
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
    """A model type of transformers, said in the names of one of our families. Data; `conversion` applies it both ways.

    A model type may have several: `registry` says which family is meant unless a caller names another.

    Attributes:
        model_type: theirs. family: ours.
        prefix: of the backbone in their heads; empty in the backbone alone.
        names: their modules or parameters in the backbone → ours; * stands for a number. Several of ours: theirs are
            fused, one above the other.
        heads: the same for what each head adds, with their prefix where it lies in their backbone.
        fields: their config fields → ours, of equal value; several of ours have the same value.
        to_ours: (their config, head, parity) → further fields of our config.
        to_theirs: (our config) → further fields of their config; raises ConfigurationError for what they cannot say.
            None: a source only.
        requested_fields: (our config, `ConversionRequest`) → fields that say which pattern and global tokens a caller
            asks for, in the words of the family; None: in those of sparse families.
        left_behind: their modules that our family lacks.
        recomputed: their parameters that a formula gives.
        copies: their parameters that equal another one.
        unused: their parameters that they keep beside the one they use.
        optional: our parameters → our config field without which they are left behind.
        doubled: our modules → ours of which they start as copies, where the config has them and the source does not.
        started: our modules or parameters that the source lacks, and that keep their start values.
        warning: (our config) → what the user of such a model should know; empty: nothing.
        warning_there: (their config) → what the user of a model that ours became should know; empty: nothing.
        deviations: our config fields in which they differ, and how.
        ignored_fields: their config fields that `to_ours` reads.
        two_labels: heads whose class gives its config two labels, however many it says.
        tokens_alike: (our config, theirs) → of how many tokens both read the same; None: of any number.
        mechanisms: those of our layers that a caller may ask for.
        is_dense: attention to everything, which the conversion makes sparse and long.
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
        """Return the table for a head, prefixes included; the backbone alone has none."""
        own, ours = self.prefix_of(head), self.our_prefix_of(head)
        prefixed = {own + theirs: _prefixed(ours, names) for theirs, names in self.names.items()}
        return {**prefixed, **self.heads[head]}

    def prefix_of(self, head: str) -> str:
        """Return the prefix of the backbone in a head; empty in the backbone alone."""
        return "" if head == "Model" else self.prefix

    def our_prefix_of(self, head: str) -> str:
        """Return the prefix of the backbone in a head of ours; empty in the backbone alone."""
        return OUR_PREFIX if self.prefix_of(head) else ""

    def with_prefix(self, names: Iterable[str], head: str) -> tuple[str, ...]:
        """Return names of the backbone as they are in a head, and as they are."""
        listed = tuple(names)
        return (*listed, *(self.prefix_of(head) + name for name in listed))


def separator_of(config: Any) -> int | None:
    """Return the separator of a config, which in RoBERTa's and BART's vocabularies is the end token."""
    separator = getattr(config, "sep_token_id", None)
    return config.eos_token_id if separator is None else separator


def _prefixed(prefix: str, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return prefix + names if isinstance(names, str) else tuple(prefix + name for name in names)
