"""The learned terms of one run: looked up by label, and their gradients added up by label."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.backends.blocked.kernels import wide
from hf_efficient_attn.backends.blocked.problems import Problem
from hf_efficient_attn.backends.blocked.views import in_order, put_back, query_blocks
from hf_efficient_attn.layout.block_layout import Run
from hf_efficient_attn.layout.terms import Label, Term


@dataclass(frozen=True)
class TermLookup:
    """The part of one term that a run reads.

    Attributes:
        term: values [batch or 1, heads or 1, queries or 1, labels].
    """

    term: Term
    problem: Problem
    run: Run

    def scores(self) -> Tensor:
        """Return what the term adds to the scores of the run, [heads, blocks, queries, keys]."""
        labels = self.labels()
        values = self.select(wide(self.term.values))
        if self.is_per_query:
            values = query_blocks(in_order(values, self.problem.part.queries), self.run)
        else:
            values = values[:, None]
        shape = (values.shape[0], self.run.num_blocks, self.run.block_tokens)
        return values.expand(*shape, -1).gather(-1, labels.expand(*shape, -1))

    def add_gradient(self, gradient: Tensor, d_scores: Tensor) -> None:
        """Add the gradient of the run to `gradient`, which has the shape of the values, from that of its scores."""
        labels, target = self.labels(), self.select(gradient)
        num_heads, num_labels = d_scores.shape[0], gradient.shape[-1]
        if self.is_per_query:
            by_label = d_scores.new_zeros(*d_scores.shape[:-1], num_labels)
            by_label.scatter_add_(-1, labels.expand_as(d_scores), d_scores)
            rows = in_order(target, self.problem.part.queries)
            query_blocks(rows, self.run).add_(by_label.sum(0, keepdim=True) if target.shape[0] == 1 else by_label)
            put_back(target, self.problem.part.queries, rows)
        else:
            by_label = d_scores.new_zeros(num_heads, num_labels)
            by_label.scatter_add_(1, labels.expand_as(d_scores).reshape(num_heads, -1), d_scores.flatten(1))
            target[:, 0].add_(by_label.sum(0, keepdim=True) if target.shape[0] == 1 else by_label)

    @property
    def is_per_query(self) -> bool:
        """Whether every query has values of its own."""
        return self.term.values.shape[2] > 1

    def select(self, values: Tensor) -> Tensor:
        """Return the values of the problem, [heads or 1, queries or 1, labels], a view."""
        values = values[self.problem.example if values.shape[0] > 1 else 0]
        values = values[self.problem.heads] if values.shape[0] > 1 else values
        return values[:, self.problem.queries] if self.is_per_query else values

    def labels(self) -> Tensor:
        """Return the labels of the run's pairs, [blocks or 1, queries, keys]."""
        run, device = self.run, self.term.values.device
        num_blocks = 1 if is_alike(self.term.label, run) else run.num_blocks
        blocks = torch.arange(num_blocks, device=device)[:, None]
        queries = run.first_query + blocks * run.block_tokens + torch.arange(run.block_tokens, device=device)
        if run.gathered is None:
            keys = run.first_key + blocks * run.key_step + torch.arange(run.key_tokens, device=device)
        else:
            keys = run.gathered[..., None] * run.granule + torch.arange(run.granule, device=device)
            keys = keys.flatten(1)
        query_positions = position_at(self.problem.part.queries, queries) + self.problem.query_offset
        key_positions = position_at(self.problem.part.keys, keys)
        return self.term.label.of(query_positions[:, :, None], key_positions[:, None, :])


def is_alike(label: Label, run: Run) -> bool:
    """Return whether the labels of all blocks of a run are those of its first."""
    return label.is_invariant and run.gathered is None and run.key_step == run.block_tokens


def position_at(order: Sequence[int], places: Tensor) -> Tensor:
    """Return the positions at the given places of an order."""
    if isinstance(order, range):
        return places * order.step + order.start
    return torch.tensor(order, device=places.device)[places]
