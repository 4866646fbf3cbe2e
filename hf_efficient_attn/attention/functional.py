"""Attention with a pattern, as a function of tensors."""

from collections.abc import Sequence

from torch import Tensor

from hf_efficient_attn.attention.call import build_call, checked_states, compute
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.select import AUTO
from hf_efficient_attn.layout.terms import Term
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns.pattern import Pattern


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    global_mask: Tensor | None = None,
    terms: Sequence[Term] = (),
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    backend: str = AUTO,
    return_lse: bool = False,
    query_offset: int | Tensor | None = None,
    layer: int = 0,
    first_head: int = 0,
    num_model_heads: int | None = None,
    cross: bool = False,
    query_mask: Tensor | None = None,
    query_segment_ids: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return softmax attention of every query over the keys that `pattern` lets it read, [B, H, Nq, Dv] in q's dtype.

    The masks cut each example into documents: neighbouring tokens of one segment, from the first to the last that is
    not masked. Positions count within a document and nothing is read across documents, so padding on either side, the
    other examples of a batch and packing change nothing. A masked token, and a query that may read no key, has output
    0, log-sum-exp -inf and no gradient.

    What was made of masks is kept and used again. One that was changed in place is another one, also by the memory of
    an array of numpy that it shares; only of masks on other devices than the CPU, write none by `mask.data`.

    Numbers of masked tokens, and of keys that no query may read, change nothing as long as they are finite and so are
    their scores. NaN and infinity among them are not kept out, as in torch's SDPA: 0 · NaN is NaN. "sdpa" and
    "reference" then give NaN to other tokens, "blocked" mostly does not; fill such tokens with zeros.

    With `cross` queries and keys are tokens of different sequences: cross-attention, long and global tokens (ETC,
    arXiv:2004.08483), or compressed keys that stand for several tokens each (`CompressedKeys`). Each sequence then has
    positions, a mask and documents of its own; the pattern relates the position of a query within its document to that
    of a key, and a query reads the keys of the documents that have its id.

    Without examples or queries the output is empty, as that of torch's SDPA is; every model here refuses such batches.

    Under autocast q, k and v are cast to its dtype, as torch's SDPA does it, and the output has that dtype.

    Args:
        q: queries, [B, H, Nq, D].
        k, v: keys [B, Hkv, Nk, D] and values [B, Hkv, Nk, Dv]; Hkv divides H, and query head h reads key head
            h // (H / Hkv).
        pattern: who may read whom; see `hf_efficient_attn.patterns`.
        scale: factor of the scores; None: 1 / sqrt(D).
        key_mask: bool [B, Nk], True = a token, False = padding.
        segment_ids: int [B, Nk]; neighbours with equal ids form a document.
        global_mask: bool [B, Nk], True = reads and is read by its whole document, whatever the pattern says; no token
            reads later ones under a causal pattern, one whose structure proves it (`pattern.is_causal`). Where the
            structure does not, `pattern & Causal()` does.
        terms: learned parts of the scores; see `Term`.
        sinks: a logit for each query head, [H] (or [num_model_heads], of which these heads get theirs), that every
            row's softmax counts beside its keys and that has no value (GPT-OSS); differentiable. The log-sum-exp then
            counts it too, and a token without any key has output 0 and log-sum-exp `sinks[h]`.
        softcap: bound c of the scaled scores, c · tanh(score / c), before terms are added (Gemma 2); None: no bound.
        dropout: probability with which an attention weight is dropped; unlike torch's SDPA, the call decides, so give 0
            in evaluation.
        backend: "auto", or the name of one, which then computes the call or refuses it; see `explain`.
        return_lse: return the pair (output, log-sum-exp [B, H, Nq] of each row in float32, without gradient).
        query_offset: position of the first query on the axis of the keys, also as an integer tensor, as static caches
            have it; None: the queries are the last positions, as in cached decoding. With `cross`, on their own axis;
            None: 0.
        layer: index of the layer, which random patterns depend on.
        first_head: number of the first of these heads in the model, where a process has only some of them; random
            patterns and `PerHead` are laid over all heads.
        num_model_heads: query heads of the model; None: these are all.
        cross: queries and keys are tokens of different sequences; there may be more queries than keys, and no
            `global_mask`, and the pattern must be the same at every length.
        query_mask: with `cross`, bool [B, query_offset + Nq], True = a token, of the axis of the queries up to the last
            of them. A query that is none has output 0 and log-sum-exp -inf.
        query_segment_ids: with `cross`, int [B, query_offset + Nq]; neighbours with equal ids form a document. Give
            `segment_ids`, too.

    Raises:
        InputError: shapes, dtypes or devices that do not fit together.
        ConfigurationError: a pattern that these heads or this length cannot have.
        UnsupportedBackendError: the chosen backend cannot compute this.
    """
    q, k, v = checked_states(q, k, v, cross)
    followed = LayerPattern(pattern, layer, first_head=first_head, num_model_heads=num_model_heads, is_cross=cross)
    tokens = TokenMask(key_mask, segment_ids, global_mask, query_mask, query_segment_ids)
    call = build_call(q, k, v, followed, query_offset, tokens, terms, sinks, softcap, scale, dropout)
    out, lse = compute(q, k, v, call, backend, need_lse=return_lse)
    return out if lse is None or not return_lse else (out, lse)
