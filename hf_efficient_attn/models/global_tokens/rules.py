"""Global tokens: the tokens of a batch that attend to all tokens, and that all tokens attend to.

A config selects them by a rule (`global_tokens`); a call may replace the rule with `global_attention_mask`.
Source: Beltagy et al., "Longformer" (arXiv:2004.05150), sections 3.1 and 5.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.integration.unsupported import check_marked, check_marked_shape
from hf_efficient_attn.layout.transfer import derived, device_numbers, on_host, prefetch_to_host
from hf_efficient_attn.messages import shown

Rule = str | Mapping[str, Any] | None

WORDS = ("auto", "first", "question", "choice")
FIELDS = {"positions": "list of integers from 0", "token_ids": "list of integers from 0", "every": "integer from 1"}
# the rule that "auto" stands for, by the task of the head; other heads have no global tokens
AUTO_RULES = {"sequence_classification": "first", "question_answering": "question", "multiple_choice": "choice"}

NOT_RELATIVE = (
    "position_embedding_type='relative' covers only distances within a window, but tokens attend to global tokens at "
    "any distance."
)


@dataclass(frozen=True)
class GlobalTokenSelection:
    """The global tokens of one batch.

    Attributes:
        positions: positions within each document, the same in all documents; they become part of the pattern.
        mask: bool [batch, keys], if global tokens differ between examples; None: they do not.
        every: all positions divisible by this are global; used instead of `positions` if lengths are symbolic.
        is_named: whether the config lists the positions, so every document must have them.
    """

    positions: tuple[int, ...] = ()
    mask: Tensor | None = None
    every: int | None = None
    is_named: bool = False

    def on_host(self) -> "GlobalTokenSelection":
        """Return the same selection with its mask on the host."""
        return self if self.mask is None else replace(self, mask=on_host(self.mask))


def check_rule(rule: Rule, vocab_size: int, num_positions: int | None) -> None:
    """Raise ConfigurationError if `global_tokens` is not a rule, or has positions or tokens that no input can have.

    num_positions: the longest input in tokens; None: there is no limit.
    """
    if rule is None or rule in WORDS:
        return
    if isinstance(rule, Mapping) and len(rule) == 1:
        ((name, value),) = rule.items()
        values = value if name != "every" else [value]
        least = 1 if name == "every" else 0
        is_sequence = isinstance(values, list | tuple) and len(values) > 0
        if name in FIELDS and is_sequence and all(type(item) is int and item >= least for item in values):
            _check_limit(rule, name, values, {"positions": num_positions, "token_ids": vocab_size}.get(name))
            return
    forms = ", ".join(f'{{"{name}": {form}}}' for name, form in FIELDS.items())
    raise ConfigurationError(f"global_tokens={shown(rule)}; it must be None, one of {', '.join(WORDS)}, or {forms}.")


def _check_limit(rule: Rule, name: str, values: Sequence[int], limit: int | None) -> None:
    if limit is not None and max(values) >= limit:
        what, field = ("position", "max_position_embeddings") if name == "positions" else ("token", "vocab_size")
        raise ConfigurationError(
            f"global_tokens={shown(rule)} has the {what} {max(values)}, but inputs have {what}s 0 to {limit - 1} "
            f"({field}={limit})."
        )


def needs_input_ids(rule: Rule) -> bool:
    """Return whether a rule depends on token ids."""
    return rule in ("question", "choice") or (isinstance(rule, Mapping) and "token_ids" in rule)


def choose_by_rule(
    rule: Rule,
    num_keys: int,
    input_ids: Tensor | None,
    is_token: Tensor | None,
    sep_token_id: int | None,
    past_tokens: int | Tensor = 0,
) -> GlobalTokenSelection:
    """Return the global tokens of a batch by a rule; "auto" must be resolved already.

    Args:
        num_keys: number of cached and new tokens.
        input_ids: [batch, tokens]; None if embeddings were given.
        is_token: [batch, keys], 0 for padding; None: all are tokens.
        sep_token_id: the token that ends the question.

    Raises:
        InputError: a question without a separator, or a rule that needs token ids that are unknown.
    """
    if rule is None:
        return GlobalTokenSelection()
    if rule == "first":
        return GlobalTokenSelection((0,))
    if isinstance(rule, Mapping) and "positions" in rule:
        return GlobalTokenSelection(tuple(sorted(set(rule["positions"]))), is_named=True)
    if isinstance(rule, Mapping) and "every" in rule:
        if torch.compiler.is_compiling():
            return GlobalTokenSelection(every=rule["every"])
        return GlobalTokenSelection(tuple(range(0, num_keys, rule["every"])))
    is_cached = not isinstance(past_tokens, int) or past_tokens > 0
    if input_ids is None or is_cached:
        what = "the ids of cached tokens are not kept" if is_cached else "inputs_embeds have no ids"
        raise InputError(
            f"global_tokens={shown(rule)} needs the ids of all tokens, but {what}. Pass global_attention_mask [batch, "
            f"{num_keys}], 1 = global."
        )
    if isinstance(rule, Mapping):
        wanted = tuple(rule["token_ids"])
        return GlobalTokenSelection(
            mask=derived(lambda ids: torch.isin(ids, device_numbers(wanted, ids.device)), input_ids)
        )
    return GlobalTokenSelection(mask=_around_separator(rule, input_ids, is_token, sep_token_id))


def _around_separator(rule: str, input_ids: Tensor, is_token: Tensor | None, sep_token_id: int | None) -> Tensor:
    """Return the tokens before the first separator ("question"), or those after the one that follows it ("choice")."""
    if sep_token_id is None:
        raise InputError(
            f"global_tokens={shown(rule)} needs the separator that ends the question: set config.sep_token_id, or pass "
            "global_attention_mask."
        )

    def separators(input_ids: Tensor, is_token: Tensor | None) -> Tensor:
        # the padding token may be the separator
        is_separator = input_ids == sep_token_id
        return is_separator if is_token is None else is_separator & is_token.bool()

    def around(is_separator: Tensor, is_token: Tensor | None) -> Tensor:
        index = torch.arange(is_separator.shape[1], device=is_separator.device)
        end = is_separator.int().argmax(1, keepdim=True)
        chosen = index < end if rule == "question" else index > end + 1
        return chosen if is_token is None else chosen & is_token.bool()

    prefetch_to_host(input_ids, is_token)
    is_separator = derived(separators, input_ids, is_token)
    if not torch.compiler.is_compiling() and not bool(on_host(is_separator).any(1).all()):
        row = int((~on_host(is_separator).any(1)).nonzero()[0])
        raise InputError(
            f"Example {row} has no separator (sep_token_id={sep_token_id}), so its question has no end. Tokenize "
            "question and text as a pair, or pass global_attention_mask."
        )
    return derived(around, is_separator, is_token)


def choose_by_mask(
    global_attention_mask: Tensor, batch_size: int, num_tokens: int, is_token: Tensor | None
) -> GlobalTokenSelection:
    """Return the tokens that a call marks as global; marked padding stays padding.

    Args:
        global_attention_mask: [batch, tokens], 1 or True = global, over cached and new tokens.
        is_token: [batch, tokens], 0 for padding; None: all are tokens.

    Raises:
        InputError: a mask with a wrong shape or other values, or that marks only padding in some example.
    """
    check_marked_shape(global_attention_mask, batch_size, num_tokens)
    check_marked(global_attention_mask, is_token)
    return GlobalTokenSelection(mask=derived(lambda mask: mask.bool(), global_attention_mask))
