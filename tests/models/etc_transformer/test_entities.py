"""Global tokens of entities with several mentions, and of contexts without an order, against links made by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from models.etc_transformer.dense_etc import Text, dense_etc
from models.etc_transformer.tiny_models import build
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea
from hf_efficient_attn.models.etc_transformer.structured_inputs import sentences
from hf_efficient_attn.patterns import Band, BlockLocal

# w3 is an entity of three mentions, the last of two words; w6 one of a single mention
TEXT = "w3 w4. w5 w6 w3! w7 w3 w8."
W3, W6 = [(0, 2), (13, 15), (20, 26)], [(10, 12)]
PARTS = [*sentences(TEXT), W3, W6]
LINKS = [{0, 3}, {0}, {1}, {1, 4}, {1, 3}, {2}, {2, 3}, {2, 3}]
QUESTION, NUM_WORDS = "w9 w10", 4


def encode(texts: Any, side: str = "right", **options: Any) -> Any:
    tokenizer = word_tokenizer(61)
    tokenizer.padding_side = side
    return hea.structured_inputs(tokenizer, texts, **options)


def links_of(found: Any, row: int) -> list[set[int]]:
    """Return the links of the real tokens of a row, and check that padding has none."""
    real = found["attention_mask"][row].bool()
    assert (found["long_to_global"][row][~real] == -1).all()
    return [{number for number in numbers if number >= 0} for numbers in found["long_to_global"][row][real].tolist()]


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_entity_has_one_global_token_for_all_of_its_mentions(side: str) -> None:
    found = encode(["w1", TEXT], side, parts=[[[(0, 2)]], PARTS])
    assert links_of(found, 0) == [{0}]
    assert links_of(found, 1) == LINKS
    assert found["global_mask"].tolist() == [[1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert "global_contexts" not in found


def test_mentions_overlap_and_come_in_any_order() -> None:
    """A token that is in two mentions of an entity is linked once."""
    found = encode([TEXT], parts=[[*sentences(TEXT), [(20, 26), (20, 22), (0, 2), (13, 15)], W6]])
    assert links_of(found, 0) == LINKS
    assert found["long_to_global"].shape == (1, 8, 2)


def test_an_entity_of_which_every_mention_is_cut_away_has_no_global_token() -> None:
    found = encode([TEXT], parts=[PARTS], max_length=3, has_whole_text=True)
    # the whole text, the first two sentences, and w3, of which a mention is left
    assert links_of(found, 0) == [{0, 1, 3}, {0, 1}, {0, 2}]
    assert found["global_mask"].tolist() == [[1, 1, 1, 1]]
    contexts = encode([TEXT], parts=[PARTS], max_length=3, contexts=[[0, 0, 0, 1, 2]])["global_contexts"]
    assert contexts.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_entities_beside_a_question(side: str) -> None:
    """Its answer is in the part in one of whose mentions it begins."""
    pairs, begin = [("w1", "w2"), (QUESTION, TEXT)], TEXT.index("w8")
    answers = [None, (begin, begin + 2)]
    options: dict[str, Any] = {"parts": [[], [W6, W3, (20, 26)]], "answers": answers, "has_whole_text": True}
    found = encode(pairs, side, contexts=[[], [5, 3, 3]], **options)
    assert links_of(found, 0) == [{1}, {0}]
    # whole text 0, question 1 and 2, W6 3, W3 4, the last words 5
    of_text = [{0, 4}, {0}, {0}, {0, 3}, {0, 4}, {0}, {0, 4, 5}, {0, 4, 5}]
    assert links_of(found, 1) == [{1}, {2}, *of_text]
    assert found["global_contexts"].tolist() == [[0, 1, 0, 0, 0, 0], [0, 1, 1, 2, 3, 3]]
    # the last words alone are in an interval of their own
    real = found["attention_mask"].bool()
    assert found["long_contexts"][0][real[0]].tolist() == [1, -1]
    assert found["long_contexts"][1][real[1]].tolist() == [1, 1, *[3] * 8]
    assert found["global_token_type_ids"][1].tolist() == [0, 5, 5, 7, 7, 7]
    assert found["long_answer_positions"].tolist() == [-100, 4]
    with torch.no_grad():
        model = build("AutoModelForQuestionAnswering", long_answers=True)
        assert model(**found).long_answer_logits.shape == (2, 6)


def test_links_and_contexts_reach_the_model() -> None:
    model = build(num_hidden_layers=2, num_attention_heads=2, hard_global_to_long=True).double()
    found = encode([TEXT], parts=[PARTS], contexts=[[4, 4, 4, 2, 7]])
    text = Text(found["input_ids"][0].tolist(), [1] * 5, LINKS, [0, 0, 0, 1, 2])
    with torch.no_grad():
        long, globals_ = dense_etc(model, text)
        states = model(**found)
    torch.testing.assert_close(states.last_hidden_state[0], long)
    torch.testing.assert_close(states.global_hidden_state[0], globals_)


def states_by_context(
    model: Any, order: list[int], is_told: bool, reads_across: bool = False
) -> dict[int, torch.Tensor]:
    """Return the states of each context, long tokens before global ones, and under −1 those of the question.

    A context is four words in two sentences, and the whole of it.

    reads_across: whether the model is not told of which context long tokens are.
    """
    written = [f"w{base} w{base + 1}. w{base + 2} w{base + 3}." for base in range(11, 11 + 4 * len(order), 4)]
    parts, places, text = [], [], ""
    for number in order:
        start, text = len(text), f"{text}{written[number]} "
        stop = start + len(written[number])
        found = [(start + first, start + last) for first, last in sentences(written[number])]
        parts += [(start, stop), *found, [(start, start + 2), (stop - 4, stop)]]
        places += [number] * 4
    inputs = encode([("w1 w2 w3 w4", text)], parts=[parts], contexts=[places] if is_told else None)
    if reads_across:
        del inputs["long_contexts"]
    with torch.no_grad():
        out = model(**inputs)
    states = torch.stack([out.last_hidden_state[0], out.global_hidden_state[0]])
    assert states.shape[1] == NUM_WORDS * (1 + len(order))
    return dict(zip([-1, *order], states.split(NUM_WORDS, 1), strict=True))


@pytest.mark.parametrize(
    ("fields", "reads_across"),
    [
        ({"local_radius": 5}, False),
        ({"local_radius": 0}, True),
        ({"attention_pattern": BlockLocal(NUM_WORDS) & Band(2, 2)}, True),
    ],
    ids=["band", "itself", "blocks"],
)
def test_contexts_have_no_order(fields: dict[str, Any], reads_across: bool) -> None:
    """Where no long token reads one of another context; they have one if the model is not told of them."""
    model = build(num_hidden_layers=2, **fields).double()
    for is_told in (True, False):
        across = is_told and reads_across
        one, other = (states_by_context(model, order, is_told, across) for order in ([0, 1, 2], [2, 0, 1]))
        for context, states in one.items():
            if is_told:
                torch.testing.assert_close(other[context], states)
            else:
                assert (other[context] - states).abs().amax((1, 2)).gt(1e-4).all()


def test_long_tokens_read_their_band_across_contexts_without_long_contexts() -> None:
    model = build(num_hidden_layers=1, local_radius=1).double()
    one, other = (states_by_context(model, order, True, reads_across=True) for order in ([0, 1, 2], [2, 0, 1]))
    is_same = (one[0][0] - other[0][0]).abs().amax(-1) < 1e-12
    assert is_same.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        ([], r"\[\]"),
        ([(0, 2), 5], r"\[\(0, 2\), 5\]"),
        ([(0, 2), (5, 5)], r"\[\(0, 2\), \(5, 5\)\]"),
        ([[(0, 2)], [(3, 5)]], r"\[\[\(0, 2\)\], \[\(3, 5\)\]\]"),
        ({"w3": (0, 2)}, "{'w3': "),
        ("w3", "'w3'"),
        (torch.tensor([0.0, 2.0]), r"tensor\(\[0\., 2\.\]\)"),
        (torch.tensor(2), r"tensor\(2\)"),
        (np.array([0, 2, 4]), r"array\(\[0, 2, 4\]\)"),
    ],
)
def test_what_is_neither_an_interval_nor_mentions(part: Any, shown: str) -> None:
    with pytest.raises(hea.InputError, match=f"parts has {shown}.*for an entity a list of at least one of them"):
        encode([TEXT], parts=[[(0, 2), part]])


@pytest.mark.parametrize("kind", [torch.tensor, np.array, lambda numbers: list(np.array(numbers))])
def test_whole_numbers_of_any_kind(kind: Any) -> None:
    """Intervals, contexts, candidates and answers may be tensors, arrays, or lists of numbers of these."""
    pairs = [(QUESTION, TEXT)]
    options = {"has_whole_text": True, "answers": [(3, 5)], "contexts": [[1] * 5], "candidates": [[3, 4]]}
    expected = encode(pairs, parts=[PARTS], **options)
    parts = [*map(kind, sentences(TEXT)), kind(W3), [kind(W6[0])]]
    given = {name: [kind(each) for each in options[name]] for name in ("answers", "contexts", "candidates")}
    found = encode(pairs, parts=[parts], **{**options, **given})
    # a tensor for each text, all of whose parts are intervals
    whole = encode([TEXT], parts=[kind(sentences(TEXT))])
    for one, other in ((found, expected), (whole, encode([TEXT]))):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(
    ("contexts", "message"),
    [
        (3, "contexts is 3 for 1 texts; give one for each text"),
        ([], "contexts has 0 lists for 1 texts; give one for each text"),
        ([0], "contexts has 1 lists for 1 texts; give one for each text"),
        ([[0, 0, 0]], r"contexts has \[0, 0, 0\] for a text of 5 parts; give an integer for each"),
        ([[0, 0, 0, 0, 1.0]], r"contexts has \[0, 0, 0, 0, 1.0\] for a text of 5 parts"),
        ([torch.tensor(0)], "contexts has 1 lists for 1 texts; give one for each text"),
        (
            [torch.zeros(5)],
            r"contexts has tensor\(\[0\., 0\., 0\., 0\., 0\.\]\) for a text of 5 parts; give an integer",
        ),
        ([[0, 1, 0, 2, 2]], r"contexts has \[0, 1, 0, 2, 2\], where parts of a context lie between"),
    ],
)
def test_contexts_that_are_not_those_of_the_parts(contexts: Any, message: str) -> None:
    with pytest.raises(hea.InputError, match=message):
        encode([TEXT], parts=[PARTS], contexts=contexts)
