"""What follows from the mechanism of each layer: what it starts from, what it keeps in a cache, what `explain` says."""

from typing import Any

from hf_efficient_attn.attention.indexed.config_field import has_indexer
from hf_efficient_attn.attention.layer_patterns import FIELD, NAME
from hf_efficient_attn.models.mechanisms.config import LayerMechanisms

from .config_checks import LINEAR, PRIOR


class BlockMechanisms(LayerMechanisms):
    """Mixin: layers of one config with softmax attention, a prior, or linear attention."""

    mechanism: str | list[str | None] | None
    initializer_range: float
    query_init_std: float | None
    key_init_std: float | None

    @property
    def has_mechanism(self) -> bool:
        """Whether a layer has other attention than softmax, so that none is computed by a function of transformers."""
        this: Any = self
        return len(self.layers_with(None)) < this.num_hidden_layers

    # where layers call the attention interface of transformers, the guard checks the inputs, as of its own models
    checks_inputs = False

    @property
    def follows_patterns(self) -> bool:
        """Whether layers ask the engine themselves, so that no trial can see that they follow a pattern."""
        return self.has_mechanism

    @property
    def default_implementation(self) -> str | None:
        """ "efficient" where layers do not read all by softmax, or have indexers; None: as transformers chooses."""
        this: Any = self
        is_own = this.span is not None or self.has_mechanism
        return NAME if is_own or getattr(self, FIELD, None) is not None or has_indexer(self) else None

    @property
    def distinct_mechanism(self) -> Any:
        """The mechanism of all layers, however it is given, or a list if they differ."""
        is_list_of_one = isinstance(self.mechanism, list) and len({*self.mechanism}) == 1
        return self.mechanism_of_layer(0) if is_list_of_one else self.mechanism

    def start_of_queries(self, layer_idx: int) -> float:
        """Return the standard deviation of W^Q of a layer at the start."""
        this: Any = self
        if self.query_init_std is not None:
            return self.query_init_std
        starts_at_zero = this.is_shaped and self.mechanism_of_layer(layer_idx) != LINEAR
        return 0.0 if starts_at_zero else self.initializer_range

    def start_of_keys(self, layer_idx: int) -> float | None:
        """Return the standard deviation of W^K of a layer at the start; None: as of every other map."""
        this: Any = self
        starts_at_zero = this.is_shaped and self.mechanism_of_layer(layer_idx) == LINEAR
        return 0.0 if self.key_init_std is None and starts_at_zero else self.key_init_std

    def cached_numbers(self, layer_idx: int, num_tokens: int) -> int:
        """Return how many numbers a layer of a causal model keeps of a text of so many tokens, besides its mean."""
        this: Any = self
        is_linear = self.mechanism_of_layer(layer_idx) == LINEAR
        of_head = this.state_of_head if is_linear else 2 * num_tokens * this.head_dim
        return int(this.key_value_heads * of_head)

    @property
    def attention_notes(self) -> tuple[str, ...]:
        """What `explain` says of layers that take the mean of what they read."""
        this: Any = self
        follows = getattr(self, FIELD, None) is not None
        note = "Shaped attention also takes the mean of what it reads, which costs as much again."
        return (note,) if this.is_centered and (follows or has_indexer(this) or self.layers_with(PRIOR)) else ()
