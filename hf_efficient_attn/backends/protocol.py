"""What a backend is: a module with these names, which `BACKENDS` of `attention/select.py` lists."""

from typing import Protocol

from torch import Tensor

from hf_efficient_attn.layout.call import AttentionCall


class Backend(Protocol):
    """One way to compute attention.

    `attend` computes all that a call holds: masks, documents, terms, sinks, selected keys, soft cap, dropout, and the
    gradients of q, k, v, terms and sinks where `call.inputs.needs_grad`. What a backend cannot compute of these,
    `why_not` refuses. All other answers depend on the call's `traits` alone: the choice of "auto" is kept by them
    (`attention/dispatch.py`). A backend imports no other; `kernels`, `machine_costs` and `operator` are shared.
    """

    NAME: str

    def why_not(self, call: AttentionCall) -> str | None:
        """Return one sentence that says why this backend cannot compute a call; None: it can.

        A call with a `query_start` is refused by every backend that does not read it: its layout's offset is a guess.
        """

    def missing(self, call: AttentionCall) -> str | None:
        """Return the package that is missing; None: none is, or `why_not` refuses the call for another reason, too."""

    def is_fastest(self, call: AttentionCall) -> bool:
        """Return whether no backend can be faster or need less memory, as far as this is known at once.

        It is asked in every call that is not being compiled; where it is True, nobody is asked for its cost.
        """

    def cost(self, call: AttentionCall) -> float:
        """Return the estimated time of one example, in scores of dense attention without a mask.

        Infinite: "auto" takes it only by its rank. Called only where `why_not` returns None, and
        never while compiling, since lengths may then be symbols.
        """

    def rank(self, call: AttentionCall) -> int | None:
        """Return the place of this backend where "auto" cannot compare costs: the least that can compute it is taken.

        That is while compiling, and where all backends need too much memory. None: it is used only by name. Lengths may
        be symbols, which a comparison with a number other than 1 would turn into constants of the program.
        """

    def remark(self, call: AttentionCall) -> str:
        """Return one sentence on why another backend may be chosen for a call that this one can compute."""

    def computed_pairs(self, call: AttentionCall) -> int:
        """Return how many scores of one example are computed, allowed or not, in all heads."""

    def working_bytes(self, call: AttentionCall) -> int:
        """Return the estimated memory of one example besides inputs, output and gradients."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, need_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, Nq, Dv] in q's dtype and the lse [B, H, Nq] of each row.

        lse is in float32, or in float64 for float64 inputs, and has a gradient only where `call.lse_needs_grad`, which
        a backend computes or refuses. The row of a masked token, and one without keys, is 0 with lse -inf; with sinks,
        the lse of a row without keys is its sink. Queries and keys of different sequences (`layout.is_cross`) have
        positions and documents of their own (`axis_locations`, `TokenMask.documents`).

        Args:
            q: queries, [B, H, Nq, D].
            k, v: keys [B, Hkv, Nk, D] and values [B, Hkv, Nk, Dv].
            need_lse: if False, None may be returned instead of lse.
        """
