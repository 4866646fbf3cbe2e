"""The operators `|`, `&` and `~` of every pattern, and its causal form."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_efficient_attn.patterns.pattern import Pattern


class Operators:
    """What makes unions, intersections, complements and causal forms; their classes are subclasses of this one."""

    def __or__(self: "Pattern", other: "Pattern") -> "Pattern":  # type: ignore[misc]
        if not isinstance(other, Operators):
            return NotImplemented
        from hf_efficient_attn.patterns.algebra import Union

        return self if self == other else Union((self, other))

    def __and__(self: "Pattern", other: "Pattern") -> "Pattern":  # type: ignore[misc]
        if not isinstance(other, Operators):
            return NotImplemented
        from hf_efficient_attn.patterns.algebra import Intersection

        return self if self == other else Intersection((self, other))

    def __invert__(self: "Pattern") -> "Pattern":  # type: ignore[misc]
        from hf_efficient_attn.patterns.algebra import Complement

        return Complement(self)

    def causal(self: "Pattern") -> "Pattern":  # type: ignore[misc]
        """Return the causal form: no key after its query."""
        from hf_efficient_attn.patterns.bands import Causal

        return self if self.is_causal else self & Causal()
