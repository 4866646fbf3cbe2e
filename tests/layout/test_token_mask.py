"""Token masks cut examples into documents."""

import pytest
import torch
from accelerate.utils import send_to_device

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import Document, TokenMask
from hf_efficient_attn.patterns.bands import Band, Full
from hf_efficient_attn.patterns.global_tokens import GlobalTokens


def mask(*rows: str) -> torch.Tensor:
    return torch.tensor([[character == "1" for character in row] for row in rows])


def test_no_mask_is_one_document() -> None:
    assert list(TokenMask().documents(2, 5)) == [(Document(0, 5),), (Document(0, 5),)]


def test_padding_is_outside_and_holes_are_inside() -> None:
    tokens = TokenMask(key_mask=mask("00111", "11100", "01011", "00000"))
    assert list(tokens.documents(4, 5)) == [(Document(2, 5),), (Document(0, 3),), (Document(1, 5, has_holes=True),), ()]


def test_segments_and_chosen_globals_count_from_the_start_of_their_document() -> None:
    tokens = TokenMask(
        key_mask=mask("1111101"), segment_ids=torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), global_mask=mask("0100110")
    )
    assert list(tokens.documents(1, 7)) == [(Document(0, 3, (1,)), Document(3, 7, (1,), has_holes=True))]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (TokenMask(key_mask=torch.ones(2, 4, dtype=torch.bool)), "key_mask"),
        (TokenMask(key_mask=torch.ones(2, 5)), "key_mask"),
        (TokenMask(global_mask=torch.ones(2, 5, dtype=torch.int64)), "global_mask"),
        (TokenMask(segment_ids=torch.ones(2, 5)), "segment_ids"),
        (TokenMask(key_mask=[[True] * 5] * 2), "key_mask"),
        (TokenMask(key_mask=torch.ones(2, 5, dtype=torch.bool, device="meta")), "key_mask is on meta"),
    ],
)
def test_wrong_masks_are_refused(tokens: TokenMask, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tokens.check(2, 5, torch.device("cpu"))


def test_a_layout_of_a_document_counts_from_zero() -> None:
    layout = Layout(Band(2, 2), 1, 4, 10, 6)
    own = layout.of_document(Document(5, 9))
    assert (own.num_queries, own.num_keys, own.query_offset) == (3, 4, 1)
    assert layout.of_document(Document(0, 6)).num_queries == 0


def test_queries_on_their_own_axis_read_the_documents_of_their_id() -> None:
    """Id 2 twice among the keys, id 4 and a query of id 3 nowhere else, padding before the second query document."""
    tokens = TokenMask(
        segment_ids=torch.tensor([[2, 2, 1, 2, 4]]),
        query_mask=torch.tensor([[True, True, False, True, True, True, True]]),
        query_segment_ids=torch.tensor([[1, 1, 2, 2, 2, 2, 3]]),
    )
    (found,) = tokens.documents(1, 5, 7)
    assert found == (Document(2, 3, queries=(0, 2)), Document(0, 2, queries=(3, 6)), Document(3, 4, queries=(3, 6)))
    layout = Layout(Full(), 1, 3, 5, 4, is_cross=True)
    own = [layout.of_document(document) for document in found]
    assert [(each.num_queries, each.query_offset, each.num_keys) for each in own] == [(0, 2, 1), (2, 1, 2), (2, 1, 1)]


def test_chosen_globals_are_causal_under_a_causal_pattern() -> None:
    own = Layout(Band(2, 0), 1, 10, 10).of_document(Document(0, 10, (4,)))
    assert own.pattern.is_causal
    assert own.pattern.allowed(9, 4)
    assert not own.pattern.allowed(2, 4)
    assert Layout(Band(2, 2), 1, 10, 10).of_document(Document(0, 10, (4,))).pattern == Band(2, 2) | GlobalTokens([4])


@pytest.mark.parametrize(
    ("num_keys", "offset", "is_cross", "message"),
    [
        (10, 7, False, "cross=True"),
        (10, -1, False, "query_offset=-1"),
        (3, -1, True, "query_offset=-1"),
        (3, -1, False, "cross=True"),
    ],
)
def test_queries_beyond_the_keys_are_refused(num_keys: int, offset: int, is_cross: bool, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Layout(Band(2, 2), 1, 4, num_keys, offset, is_cross=is_cross)


def test_hooks_of_accelerate_move_the_mask_of_a_layer() -> None:
    moved = send_to_device({"token_mask": TokenMask(mask("011"))}, "meta", non_blocking=True)["token_mask"]
    assert moved.key_mask.device.type == "meta"
    assert moved.segment_ids is None


def test_layers_share_the_mask_of_the_last_keys() -> None:
    tokens = TokenMask(mask("0111"), global_mask=mask("0010"))
    last = tokens.last(2)
    assert last.key_mask.tolist() == [[True, True]]
    assert last.global_mask.tolist() == [[True, False]]
    assert tokens.last(2) is last
