"""How a text is cut over the processes of a mesh: each holds a shard, neighbouring tokens of every example."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_efficient_attn.errors import InputError

AUTO, HALO, HEADS = "auto", "halo", "heads"
MODES = (AUTO, HALO, HEADS)

# the attribute in which a module keeps them
SHARDS = "_sequence_shards"
# (first, stop) of the tokens of every process
Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SequenceShards:
    """The processes that share a text, in the order of its tokens.

    Attributes:
        mesh: a `torch.distributed.device_mesh.DeviceMesh` of one dimension.
        mode: how attention gets what other processes hold: "halo", "heads" or, by what is sent, "auto".
    """

    mesh: Any
    mode: str = AUTO

    def __deepcopy__(self, memo: Any) -> "SequenceShards":
        # processes cannot be copied with a model
        return self

    @property
    def group(self) -> Any:
        """The process group of the collectives."""
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        """The place of this process among them."""
        return int(self.mesh.get_local_rank())

    @property
    def size(self) -> int:
        """How many processes there are."""
        return int(self.mesh.size())

    def own(self, num_tokens: int) -> slice:
        """Return which of so many tokens of a text this process holds."""
        return slice(*shard_bounds(num_tokens, self.size)[self.rank])


def shard_bounds(num_tokens: int, num_shards: int) -> Bounds:
    """Return (first, stop) of every shard; the first ones have a token more where the length is not divisible.

    >>> shard_bounds(10, 4)
    ((0, 3), (3, 6), (6, 8), (8, 10))

    Raises:
        InputError: fewer tokens than shards.
    """
    if num_tokens < num_shards:
        raise InputError(
            f"A text of {num_tokens} tokens cannot be cut over {num_shards} processes. Pass at least a token for each."
        )
    length, longer = divmod(num_tokens, num_shards)
    edges = [shard * length + min(shard, longer) for shard in range(num_shards + 1)]
    return tuple(zip(edges, edges[1:], strict=False))


def shards_of(module: nn.Module) -> SequenceShards | None:
    """Return the processes that share the texts of a module; None: it has whole texts."""
    # code that torch can trace
    return getattr(module, SHARDS, None)


def why_whole(config: Any) -> str | None:
    """Return why `shard_sequence` takes no model with this config, as the end of a sentence; None: it may take it."""
    if not getattr(config, "can_shard_sequence", True):
        return (
            f"models of the family {config.model_type} read whole sequences. Of the families, shard_sequence takes "
            "sparse_transformer, adaptive_span and simplified_transformer, and of transformers decoders and encoders "
            'with attn_implementation="efficient".'
        )
    if config.is_encoder_decoder or config.get_text_config() is not config:
        return "it joins several models. Shard a model of text alone."
    return None
