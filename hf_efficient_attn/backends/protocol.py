"""The interface of a backend: a module with these names that is listed in `BACKENDS` of `attention/select.py`."""

from typing import Protocol

from torch import Tensor

from hf_efficient_attn.layout.call import AttentionCall


class Backend(Protocol):
    """One way to compute attention.

    `attend` computes everything in a call: masks, documents, terms, sinks, selected keys, soft cap, dropout, and the
    gradients of q, k, v, terms and sinks if `call.inputs.needs_grad`. `why_not` refuses calls that need anything the
    backend cannot compute. All methods but `attend` depend only on the call's `traits`, because the choice of "auto" is
    cached by them (`attention/dispatch.py`). Backends do not import each other; they share `kernels`, `machine_costs`
    and `operator`.
    """

    NAME: str

    def why_not(self, call: AttentionCall) -> str | None:
        """Return one sentence that says why this backend cannot compute a call; None: it can.

        A backend that does not use `query_start` refuses calls that have one: the offset in their layout is a guess.
        """

    def missing(self, call: AttentionCall) -> str | None:
        """Return the name of a missing package; None: none is missing, or `why_not` also has another reason."""

    def is_fastest(self, call: AttentionCall) -> bool:
        """Return whether no other backend can be faster or need less memory, as far as a quick check can tell.

        It is called for every call that is not being compiled. If it returns True, no costs are compared.
        """

    def cost(self, call: AttentionCall) -> float:
        """Return the estimated time of one example, in scores of dense attention without a mask.

        Infinite: "auto" chooses the backend only by its rank. Called only if `why_not` returns None, and never while
        compiling, because lengths may then be symbols.
        """

    def rank(self, call: AttentionCall) -> int | None:
        """Return the rank by which "auto" chooses when it cannot compare costs; the lowest one is chosen.

        It cannot while compiling, or if all backends need too much memory. None: the backend is used only by name.
        Lengths may be symbols, and comparing one with a number other than 1 makes it a constant of the program.
        """

    def remark(self, call: AttentionCall) -> str:
        """Return one sentence on why another backend may be chosen for a call that this one can compute."""

    def computed_pairs(self, call: AttentionCall) -> int:
        """Return how many scores of one example are computed in all heads, for allowed pairs and others."""

    def working_bytes(self, call: AttentionCall) -> int:
        """Return the estimated memory of one example besides inputs, output and gradients."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, need_lse: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H, Nq, Dv] in q's dtype and the lse [B, H, Nq] of each row.

        lse is in float32, or in float64 for float64 inputs. It has a gradient only if `call.lse_needs_grad`; a backend
        that cannot compute it refuses the call. Rows of masked tokens and rows without keys are 0 and have lse -inf;
        with sinks, the lse of a row without keys is its sink. If queries and keys are of different sequences
        (`layout.is_cross`), each have their own positions and documents (`axis_locations`, `TokenMask.documents`).

        Args:
            q: queries, [B, H, Nq, D].
            k, v: keys [B, Hkv, Nk, D] and values [B, Hkv, Nk, Dv].
            need_lse: if False, None may be returned instead of lse.
        """
