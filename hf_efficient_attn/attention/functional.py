"""Attention as a function of tensors: with a pattern, and within corresponding segments of two sequences."""

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, compiler

from hf_efficient_attn.attention.build_call import LayerPattern, refuse_unknown
from hf_efficient_attn.attention.dispatch import attend
from hf_efficient_attn.attention.select import AUTO, preferred_backend
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.score_terms import Term
from hf_efficient_attn.layout.selected_keys import ChosenKeys
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.patterns.bands import Full
from hf_efficient_attn.patterns.config_spec import parse_pattern
from hf_efficient_attn.patterns.pattern import Pattern

# a compiler cannot trace the parser of expressions
_parsed = torch.compiler.assume_constant_result(cached()(parse_pattern))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
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
    chosen: ChosenKeys | None = None,
    lse_gradient: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return softmax attention of every query over the keys that `pattern` allows, [B, H, Nq, Dv] in q's dtype.

    The masks divide each example into documents: a document consists of consecutive tokens with one segment id, from
    the first to the last token that is not masked. Positions count within a document, and no query attends to a key of
    another document. So padding on either side, other examples of the batch and packing change nothing. A masked token,
    and a query without any allowed key, has output 0, log-sum-exp -inf and no gradient.

    Results computed from masks are cached. You may change a mask in place, even through a numpy array that shares its
    memory. But do not write through `mask.data` to a mask that is not on the CPU.

    The contents of masked tokens, and of keys that no query may attend to, change nothing as long as they and their
    scores are finite. NaN and infinity in them may spread to other tokens, as in torch's SDPA (0 · NaN is NaN): with
    "sdpa" and "reference" they do, with "blocked" mostly not. Fill such tokens with zeros.

    With `cross=True` queries and keys belong to different sequences. Examples are cross-attention, long and global
    tokens (ETC, arXiv:2004.08483), and compressed keys, where each key stands for several tokens (`CompressedKeys`).
    Each sequence then has its own positions, mask and documents. The pattern compares the position of a query within
    its document with the position of a key within its document, and a query attends to keys of documents with its own
    id.

    >>> import torch
    >>> from hf_efficient_attn.patterns import Band, GlobalTokens
    >>> q, k, v = torch.randn(3, 1, 8, 500, 64)
    >>> attention(q, k, v, Band(left=32, right=32) | GlobalTokens([0])).shape
    torch.Size([1, 8, 500, 64])

    Without examples or queries the output is empty, as in torch's SDPA; but every model of this package refuses such
    batches.

    Under autocast q, k and v are cast to its dtype, as in torch's SDPA, and the output has that dtype.

    Args:
        q: queries [B, H, Nq, D]: examples, heads, tokens, and the width of a head.
        k, v: keys [B, Hkv, Nk, D] and values [B, Hkv, Nk, Dv]; Hkv divides H, and query head h attends to key head h //
            (H / Hkv).
        pattern: which query may attend to which key: a pattern or its expression ("band(64, 64) | global(0)"); see
            `hf_efficient_attn.patterns`.
        scale: factor of the scores; None means 1 / sqrt(D).
        key_mask: bool [B, Nk], True = a token, False = padding.
        segment_ids: int [B, Nk]; consecutive tokens with equal ids form a document.
        global_mask: bool [B, Nk], True = attends to its whole document and is attended to by all of it, whatever the
            pattern says. If the pattern is known to be causal (`pattern.is_causal`), no token attends to later ones;
            write `pattern & Causal()` if your pattern is causal, but `is_causal` is False.
        terms: learned parts of the scores; see `Term`.
        sinks: one logit for each query head, [H], or [num_model_heads] for all heads of the model; differentiable. The
            softmax of every query counts the logit as one more key without a value (GPT-OSS). The log-sum-exp also
            counts it, and a token without any key has output 0 and log-sum-exp `sinks[h]`.
        softcap: bound c of the scaled scores, c · tanh(score / c), before terms are added (Gemma 2); None: no bound.
        dropout: probability with which an attention weight is dropped; as in torch's SDPA, give 0 in evaluation.
        backend: "auto", or the name of a backend. A named backend computes the call or raises an error; see `explain`.
        return_lse: return the pair (output, log-sum-exp [B, H, Nq] of each row in float32).
        query_offset: position of the first query among the keys: an integer, or an integer tensor as in static caches.
            None: the queries are the last positions, as in cached decoding. With `cross` it is a position in the
            sequence of the queries, and None means 0.
        layer: index of the layer; random patterns depend on it.
        first_head: index in the model of the first head of q, if this process has only some of the heads. Random
            patterns and `PerHead` number all heads of the model.
        num_model_heads: the number of query heads of the model; None: q has all of them.
        cross: whether queries and keys belong to different sequences. Then there may be more queries than keys,
            `global_mask` is not allowed, and the pattern must be the same at every length.
        query_mask: with `cross`, bool [B, query_offset + Nq], True = a token, False = padding, for the sequence of the
            queries up to the last query. A masked query has output 0 and log-sum-exp -inf.
        query_segment_ids: with `cross`, int [B, query_offset + Nq]; consecutive tokens with equal ids form a document.
            Also give `segment_ids`.
        chosen: the keys selected for each query by content: `ChosenTokens`, `ChosenBlocks`, `KeyGroups` or
            `ChunkedOrder`. A query attends to those selected keys that the pattern, the documents and the masks allow.
        lse_gradient: whether the log-sum-exp also has a gradient, which is needed to join the outputs of several calls
            in one softmax; see `join_attention`. Only with `return_lse`.

    Raises:
        InputError: shapes, dtypes or devices that do not fit together, a number that is out of range, or an argument
            of other attention functions.
        ConfigurationError: a pattern that does not fit these heads or this length.
        UnsupportedBackendError: the backend cannot compute this call.
    """
    if unknown:
        refuse_unknown(unknown, attention)
    pattern = _parsed(pattern) if isinstance(pattern, str) else pattern
    layer_spec = LayerPattern(pattern, layer, first_head=first_head, num_model_heads=num_model_heads, is_cross=cross)
    tokens = NO_MASK
    if not (key_mask is segment_ids is global_mask is query_mask is query_segment_ids is None):
        tokens = TokenMask(key_mask, segment_ids, global_mask, query_mask, query_segment_ids)
    settings = (query_offset, tokens, terms, sinks, softcap, scale, dropout, chosen, backend)
    out, lse = attend(q, k, v, layer_spec, *settings, need_lse=return_lse, lse_gradient=lse_gradient)
    return out if lse is None or not return_lse else (out, lse)


# Attention to all keys of the same segment in another sequence, such as the translation of a sentence.


# the costs of `blocked` on CPUs, in units in which a score of dense attention with a mask costs its width plus
# SCORE_WIDTH: the cost of a document, and the factor by which its scores cost more than those of dense attention
WORK_PER_DOCUMENT, SCORE_WIDTH, TIMES_A_SCORE = 5_000_000, 16, 1.5


def attend_own_segments(
    query: Tensor, key: Tensor, value: Tensor, tokens: TokenMask, scale: float, dropout: float, backend: str
) -> Tensor:
    """Return the output [B, H, T, Dv] of queries that attend to the keys with their own segment id.

    Args:
        query: [B, H, T, D].
        key, value: [B, H, S, ·].
        tokens: the segments of queries and keys, and which keys are tokens.
        backend: as for `attention`.
    """
    # "auto" estimates costs without looking at documents
    if backend == AUTO and preferred_backend() == AUTO and do_documents_pay(query, key, tokens):
        backend = blocked.NAME
    options: dict[str, Any] = {"dropout": dropout, "backend": backend, "cross": True}
    masks = tokens.key_mask, tokens.segment_ids
    of_queries = tokens.query_segment_ids
    out = attention(query, key, value, Full(), scale, *masks, query_segment_ids=of_queries, **options)
    return cast(Tensor, out)


def do_documents_pay(query: Tensor, key: Tensor, tokens: TokenMask) -> bool:
    """Return whether computing documents one by one is faster than all pairs with a mask; known only on CPUs."""
    batch_size, num_heads, num_queries = query.shape[:3]
    # for a single query, dense attention reads only the keys between its first and last key anyway
    if compiler.is_compiling() or query.device.type != "cpu" or num_queries == 1:
        return False
    num_keys = key.shape[2]
    found = [each for row in tokens.documents(batch_size, num_keys, num_queries) for each in row]
    num_pairs = sum((each.stop - each.start) * (each.queries[1] - each.queries[0]) for each in found if each.queries)
    num_scores, width = batch_size * num_heads * num_queries * num_keys, query.shape[3] + SCORE_WIDTH
    return WORK_PER_DOCUMENT * len(found) + TIMES_A_SCORE * num_heads * num_pairs * width < num_scores * width
