"""What `explain` returns for a call of attention: backend and why, pairs, cost, memory; as a table and as JSON."""

from dataclasses import asdict, dataclass, field, replace
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

from hf_efficient_attn.attention.build_call import LayerPattern
from hf_efficient_attn.attention.select import AUTO, BACKENDS
from hf_efficient_attn.attention.sharded.layer import LayerExchange
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.grouped_keys import ChunkedOrder, KeyGroups
from hf_efficient_attn.layout.listed_keys import ChosenBlocks, ChosenTokens
from hf_efficient_attn.layout.score_terms import Label
from hf_efficient_attn.layout.selected_keys import MEAN, ChosenKeys
from hf_efficient_attn.messages import cut, shown
from hf_efficient_attn.patterns.config_spec import write_expression
from hf_efficient_attn.patterns.pattern import Pattern

# A choice of keys in words.


def selection_in_words(chosen: ChosenKeys) -> str:
    """Return what a query attends to at most, according to the shapes of the choice.

    >>> import torch
    >>> selection_in_words(ChosenBlocks(torch.zeros(1, 1, 4, 3, dtype=torch.int32), block_tokens=512))
    'up to 3 blocks of 512 keys for every query'
    """
    match chosen:
        case ChosenTokens(tokens=tokens):
            return f"up to {tokens.shape[3]:,} keys for every query"
        case ChosenBlocks(blocks=blocks, block_tokens=size, queries_per_choice=shared):
            query = "query" if shared == 1 else f"{shared:,} queries"
            return f"up to {blocks.shape[3]:,} blocks of {size:,} keys for every {query}"
        case KeyGroups(queries=queries, keys=keys):
            joined = "; the output of a query is the mean over its groups" if chosen.join == MEAN else ""
            _, heads, groups, most = queries.shape
            return (
                f"{groups:,} groups in each of {heads:,} heads, with up to {most:,} queries that attend to up to "
                f"{keys.shape[3]:,} keys{joined}"
            )
        case ChunkedOrder(order=order, chunk_tokens=size, chunks_before=before, chunks_after=after):
            rounds = "an order" if order.shape[2] == 1 else f"{order.shape[2]:,} orders"
            return (
                f"{rounds} of the tokens in chunks of {size:,}, each of which attends to itself, {before:,} before and "
                f"{after:,} after"
            )
    return chosen.kind


MEBIBYTE = 2**20
# longer patterns are cut, since lists of positions can have any length
PATTERN_LETTERS = 1000
# estimated costs above this, relative to dense attention, are called slower
SLOWER = 1.1
# the width of a line without a terminal, and the minimum width of the text next to the name of a row
COLUMNS, FEWEST_COLUMNS = 110, 30


@dataclass(frozen=True)
class AllLayers:
    """The total cost of attention in all layers of a model, or of one part of an encoder-decoder.

    Attributes:
        num_layers: how many layers have attention.
        relative_cost: estimated time of all of them, divided by that of their baselines.
        baseline: what would be computed without patterns, as in `Explanation`.
    """

    num_layers: int
    relative_cost: float
    baseline: str

    def __str__(self) -> str:
        layers = f"{self.num_layers} layer{'s' if self.num_layers > 1 else ''}"
        return f"{self.relative_cost:.3f} × {self.baseline} (estimated), {layers}"


@dataclass(frozen=True)
class Explanation:
    """How one call of attention would be computed; `print` shows it as a table, the answer first.

    Attributes:
        pattern: the pattern that was explained.
        call: the call without tensors; for a pattern that selects keys by content, with the positions among which it
            selects.
        backend: the name of the backend that computes it.
        reasons: for every other backend, one sentence that says why it cannot compute the call, or was not chosen.
        allowed_pairs: pairs (query, key) that the pattern allows, in all heads of one example.
        computed_pairs: scores that the backend computes for them, allowed or not.
        total_pairs: all pairs of queries and keys, in all heads.
        baseline: what would be computed without the pattern: "dense causal attention", whose kernels skip most of what
            lies above the diagonal, or "dense attention".
        relative_cost: estimated time, divided by that of the baseline.
        memory_bytes: estimated peak memory of one example, beyond its inputs.
        costs_of: the machine whose measured costs were used to compare backends, and their source.
        model: the model and its layer; None: a pattern was explained.
        notes: what the numbers leave out, in sentences.
        exchange: the bytes sent by the processes that share a sequence; None: one process has the whole sequence.
        beside: the explanation of the other heads of the layer, if heads differ. Pattern, call, backend and reasons are
            then those of the first heads; pairs, cost and memory are those of all heads.
        all_layers: the cost of all layers of the model, or of a part of an encoder-decoder; None: a pattern was
            explained, or a note says why it is unknown.
    """

    pattern: Pattern
    call: AttentionCall
    backend: str
    reasons: dict[str, str]
    allowed_pairs: int
    computed_pairs: int
    total_pairs: int
    baseline: str
    relative_cost: float
    memory_bytes: int
    costs_of: str
    model: str | None = None
    notes: tuple[str, ...] = ()
    exchange: LayerExchange | None = None
    beside: "Explanation | None" = None
    all_layers: AllLayers | None = None

    @property
    def remark(self) -> str:
        """What the backend computes, or keeps, in one sentence."""
        return BACKENDS[self.backend].remark(self.call)

    @property
    def num_heads(self) -> int:
        """The number of heads of the layer."""
        return self.call.layout.num_heads + (0 if self.beside is None else self.beside.num_heads)

    @property
    def density(self) -> float:
        """Share of all pairs that is allowed."""
        return self.allowed_pairs / self.total_pairs

    @property
    def block_density(self) -> float:
        """Share of all pairs that is computed."""
        return self.computed_pairs / self.total_pairs

    def _elsewhere(self) -> str:
        """Return a note on the backend that "auto" may choose if more packages are installed, or an empty string."""
        device = self.call.inputs.device
        lacking = {name: backend.missing(self.call) for name, backend in BACKENDS.items()}
        found = next(((name, what) for name, what in lacking.items() if what is not None), None)
        if device == "cpu" or found is None:
            return ""
        if BACKENDS[found[0]].cost(self.call) >= BACKENDS[self.backend].cost(self.call):
            return ""
        return f" (on {device}, auto may choose {found[0]} if {found[1]} is installed; here it is not)"

    def _in_short(self) -> str:
        selected = "" if self.call.chosen is None else ", selected keys"
        return f"{self.num_heads} heads, {shown_pattern(self.pattern)}{selected}, backend {self.backend}"

    def __str__(self) -> str:
        return self.to_text()

    @property
    def answer(self) -> dict[str, str]:
        """The first rows of the table: the backend, its cost relative to dense attention, and its memory."""
        is_low = self.call.inputs.device == "cpu" and self.relative_cost != 1
        low = "; in benchmarks, measured times were 1.0 to 2.8 times this" if is_low else ""
        slower = ": full attention is faster here" if self.relative_cost > SLOWER else ""
        return {
            "backend": self.backend + self._elsewhere(),
            "cost": f"{self.relative_cost:.3f} × {self.baseline} (estimated{low}){slower}",
            **({} if self.all_layers is None else {"all layers": str(self.all_layers)}),
            "memory": f"{self.memory_bytes / MEBIBYTE:,.1f} MiB beyond q, k and v (estimated, one example)",
        }

    def to_text(self, columns: int | None = None, why: bool = False) -> str:
        """Return the table that `print` shows.

        Args:
            columns: the width of a line in characters; None: the width of the terminal, or 110 if there is none.
            why: whether the table says why each of the other backends was not chosen.
        """
        layout, inputs = self.call.layout, self.call.inputs
        keys_shared = inputs.num_key_heads != layout.num_heads
        others = {f"not {name}": _predicate(name, reason) for name, reason in self.reasons.items()}
        on_demand = {"others": f"{', '.join(self.reasons)}; --why (in Python: to_text(why=True)) says why not"}
        rows = {
            **self.answer,
            **({} if self.model is None else {"model": self.model}),
            "pattern": shown_pattern(self.pattern),
            **({} if self.call.chosen is None else {"selected": selection_in_words(self.call.chosen)}),
            "call": f"{layout.num_heads} heads{f' ({inputs.num_key_heads} of keys)' if keys_shared else ''}, "
            f"{layout.num_queries:,} queries, {layout.num_keys:,} keys, "
            f"{str(inputs.dtype).removeprefix('torch.')} on {inputs.device}"
            f"{', with gradients' if inputs.needs_grad else ''}{', of two sequences' if layout.is_cross else ''}",
            **({} if self.beside is None else {"other heads": self.beside._in_short()}),
            "allowed": f"{self.allowed_pairs:,} pairs, {self.density:.2%} of queries × keys",
            "computed": f"{self.computed_pairs:,} pairs, {self.block_density:.2%} of queries × keys",
            "computes": _predicate(f"{self.backend} computes", self.remark),
            "costs of": self.costs_of,
            **({} if self.exchange is None else {"exchange": f"{self.exchange}, one example"}),
            **{"note" if index == 0 else f"note {index + 1}": note for index, note in enumerate(self.notes)},
            **(others if why else on_demand),
        }
        columns = get_terminal_size((COLUMNS, 0)).columns if columns is None else columns
        width = max(map(len, rows)) + 2
        room = max(columns - width, FEWEST_COLUMNS)
        # paths and patterns without spaces are not broken, so that they can be copied
        lines = {name: wrap(text, room, break_long_words=False, break_on_hyphens=False) for name, text in rows.items()}
        next_line = "\n" + " " * width
        return "\n".join(name.ljust(width) + next_line.join(each) for name, each in lines.items())

    def to_dict(self) -> dict[str, Any]:
        """Return everything in JSON types: pairs of all heads of one example, the cost over the baseline's, bytes."""
        layout, inputs = self.call.layout, self.call.inputs
        return {
            "model": self.model,
            "pattern": self.pattern.to_dict(),
            "call": {
                "num_heads": layout.num_heads,
                "num_key_heads": inputs.num_key_heads,
                "head_dim": inputs.head_dim,
                "query_tokens": layout.num_queries,
                "key_tokens": layout.num_keys,
                "dtype": str(inputs.dtype).removeprefix("torch."),
                "device": inputs.device,
                "training": inputs.needs_grad,
                "dropout": self.call.dropout,
                "cross": layout.is_cross,
            },
            "backend": self.backend,
            "remark": self.remark,
            "reasons": self.reasons,
            "allowed_pairs": self.allowed_pairs,
            "computed_pairs": self.computed_pairs,
            "total_pairs": self.total_pairs,
            "baseline": self.baseline,
            "relative_cost": self.relative_cost,
            "memory_bytes": self.memory_bytes,
            "costs_of": self.costs_of,
            "notes": list(self.notes),
            "beside": None if self.beside is None else self.beside.to_dict(),
            "exchange": None if self.exchange is None else self.exchange.to_dict(),
            "all_layers": None if self.all_layers is None else asdict(self.all_layers),
        }


def _predicate(subject: str, sentence: str) -> str:
    """Return a sentence for a row that already names its subject.

    >>> _predicate("flex", "flex computes whole blocks."), _predicate("flex", "sdpa was requested.")
    ('computes whole blocks.', 'sdpa was requested.')
    """
    return sentence.removeprefix(f"{subject} ")


def shown_pattern(pattern: Pattern) -> str:
    """Return a pattern as the command line takes it; a very long one is cut, and the text says where to find it."""
    text = write_expression(pattern) if pattern.kind else shown(pattern, PATTERN_LETTERS)
    if len(text) <= PATTERN_LETTERS:
        return text
    return f"{cut(text, PATTERN_LETTERS, PATTERN_LETTERS // 4)} (all of it in to_dict(), and with --json)"


# What one attention layer of a model asks the engine for, as far as it does not depend on the text.


@dataclass(frozen=True)
class LayerRequest:
    """What one attention layer asks for.

    Attributes:
        layer_spec: the pattern of the layer, and its number.
        num_heads, num_key_heads, head_dim, value_dim: the sizes of its queries, keys and values.
        config: the config of the module that asks.
        part: the part of an encoder-decoder.
        is_causal: whether the layer attends only to the past, whatever its pattern.
        is_cross: whether it attends to another sequence.
        layer: its index; None if the module does not know it.
        labels: the labels of the terms of its scores that have values for each query.
        fixed_labels: the labels of the terms that have the same values for all queries.
        softcap: bound of its scores; None if there is none.
        has_sinks, has_bias: whether it has learned sinks, and whether it adds a matrix to its scores.
        backend: which backend it asks for.
        notes: what this leaves out, in sentences.
        chosen: the keys that it chooses by content, as tensors on the device "meta"; None if it chooses none.
        most_keys: how many of the chosen keys a query attends to at most; if `chosen` is None, how many an indexer
            chooses.
        beside: what the other heads of the layer ask for, if heads differ.
        sends_more: whether processes that share a text exchange more in the layer than its pattern needs.
    """

    layer_spec: LayerPattern
    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    config: Any
    part: str = "encoder"
    is_causal: bool = False
    is_cross: bool = False
    layer: int | None = None
    labels: tuple[Label, ...] = ()
    fixed_labels: tuple[Label, ...] = ()
    softcap: float | None = None
    has_sinks: bool = False
    has_bias: bool = False
    backend: str = AUTO
    notes: tuple[str, ...] = ()
    chosen: ChosenKeys | None = field(default=None, compare=False)
    most_keys: int | None = None
    beside: "LayerRequest | None" = None
    sends_more: bool = False

    @property
    def alike(self) -> "LayerRequest":
        """This request without the layer's index, which only affects random patterns; equal for equal layers."""
        beside = None if self.beside is None else self.beside.alike
        return replace(self, layer=None, layer_spec=replace(self.layer_spec, layer=0), beside=beside)
