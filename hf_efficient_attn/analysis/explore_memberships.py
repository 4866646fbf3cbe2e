"""The clusters and buckets of the tokens of a text, in JSON types, as the page of `explore` shows them."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_efficient_attn.analysis.explore_html import packed
from hf_efficient_attn.analysis.explore_rows import sampled_rows
from hf_efficient_attn.models.parts.memberships import Membership

# numbers of clusters and buckets in the page: about 6 MB
MAX_NUMBERS = 1 << 20


def membership_data(
    found: Mapping[int, Membership], num_layers: int, num_tokens: int, rows: Sequence[int]
) -> dict[str, Any] | None:
    """Return what the page shows of the memberships of layers; None: no layer has any.

    They are those of all tokens or, if these have too many, of the measured ones and others spread evenly.

    Args:
        found: of one text, by the index of the layer.
        rows: the measured tokens.
    """
    if not found:
        return None
    of_token = sum(sum(side.shape[1] * side.shape[3] for side in _sides(each)) for each in found.values())
    tokens = sampled_rows(num_tokens, max(1, MAX_NUMBERS // of_token), rows)
    layers = [_layer_data(found[layer], tokens) if layer in found else None for layer in range(num_layers)]
    return {"tokens": tokens, "layers": layers}


def _sides(each: Membership) -> list[Any]:
    return [each.queries] if each.keys is each.queries else [each.queries, each.keys]


def _layer_data(each: Membership, tokens: Sequence[int]) -> dict[str, Any]:
    sides = [{"most": side.shape[3], "numbers": packed(side[0][:, list(tokens)], "<i4")} for side in _sides(each)]
    return {
        "kind": each.kind,
        "count": each.count,
        "heads": each.queries.shape[1],
        "queries": sides[0],
        # null: the same
        "keys": sides[1] if len(sides) > 1 else None,
    }
