"""The operators `|`, `&` and `~` of every pattern."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_efficient_attn.patterns.pattern import Pattern


class Operators:
    """What makes unions, intersections and complements; their classes are subclasses of this one."""

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
