"""What the processes that share a text would send in one layer, in bytes, without sending it."""

from dataclasses import asdict, dataclass
from typing import Any

from hf_efficient_attn.attention.sharded.key_exchange import Text
from hf_efficient_attn.attention.sharded.layer import exchange_of, refuse_on_shards
from hf_efficient_attn.attention.sharded.sequence_shards import shard_bounds
from hf_efficient_attn.attention.sharded.traffic import HeadSizes, gather_traffic
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.token_mask import Document
from hf_efficient_attn.messages import shown_bytes

# so many processes are named one by one
NAMED_RANKS = 8
# log-sum-exp and the outputs that it joins are in single precision at least
REDUCED_BYTES = 4


def shown_ranks(sent: tuple[int, ...]) -> str:
    """Return what processes send, in the order of ranks if they differ and are few.

    >>> shown_ranks((2048, 2048)), shown_ranks((0, 100)), shown_ranks((0, *[2**21] * 8))
    ('2.00 KiB each', '0 bytes, 100 bytes', '0 bytes to 2.00 MiB each')
    """
    least, most = min(sent), max(sent)
    if least == most:
        return f"{shown_bytes(most)} each"
    if len(sent) > NAMED_RANKS:
        return f"{shown_bytes(least)} to {shown_bytes(most)} each"
    return ", ".join(map(shown_bytes, sent))


@dataclass(frozen=True)
class LayerExchange:
    """What processes send each other in one layer for one example, a text without padding; it prints as a line.

    Attributes:
        mode: "halo", keys around their shards, or "heads".
        forward_bytes, backward_bytes: what each process sends to others, in the order of ranks.
        reduced_bytes: of what all processes add up (all-reduce), forward and backward: outputs of global tokens.
        gathered_bytes: what a process would send forward, and again backward, if all had all keys and values.
    """

    mode: str
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    reduced_bytes: tuple[int, int]
    gathered_bytes: int

    def __str__(self) -> str:
        added = sum(self.reduced_bytes)
        with_all = f"; each adds up {shown_bytes(added)} with all" if added else ""
        return (
            f"{self.mode} among {len(self.forward_bytes)} processes, which send forward "
            f"{shown_ranks(self.forward_bytes)}; backward {shown_ranks(self.backward_bytes)}{with_all} "
            f"(with all keys at all processes: {shown_bytes(self.gathered_bytes)} each way)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything in JSON types."""
        return {name: list(each) if isinstance(each, tuple) else each for name, each in asdict(self).items()}


def layer_exchange(call: AttentionCall, has_bias: bool, num_processes: int, mode: str) -> LayerExchange:
    """Return what processes that share a text send for a call, which is that of one process with the whole text.

    Raises:
        InputError: queries and keys that are not one text, or fewer tokens than processes.
        ConfigurationError: fewer heads than processes, where they must be dealt out.
        UnsupportedBackendError: a matrix is added to the scores.
    """
    layout, inputs = call.layout, call.inputs
    refuse_on_shards(False, has_bias, False)
    if layout.is_cross or layout.num_queries != layout.num_keys:
        raise InputError(
            f"Processes share texts that attend to themselves, but there are {layout.num_queries} queries and "
            f"{layout.num_keys} keys{' of another sequence' if layout.is_cross else ''}. Leave out sequence_ranks."
        )
    # a single value, as that of a span, is the same for all queries
    by_query = [each for each in call.terms if each.label.num_values > 1 and each.values.shape[2] > 1]
    term_values = sum(each.label.num_values for each in by_query)
    sizes = HeadSizes(layout.num_heads, inputs.num_key_heads, inputs.head_dim, inputs.value_dim, term_values)
    bounds = shard_bounds(layout.num_keys, num_processes)
    width = inputs.dtype.itemsize
    gathered = max(gather_traffic(bounds, sizes).sent) * width
    text = Text((Document(0, layout.num_keys),), ((0, layout.num_keys),))
    _, traffic = exchange_of(layout, (text,), bounds, sizes, mode, bool(call.terms))
    reduced = (traffic.reduced * max(width, REDUCED_BYTES), traffic.reduced_backward * max(width, REDUCED_BYTES))
    return LayerExchange(
        traffic.mode,
        tuple(count * width for count in traffic.sent),
        tuple(count * width for count in traffic.received),
        reduced,
        gathered,
    )
