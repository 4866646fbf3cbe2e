"""Questions and texts as inputs of an ETC: global tokens of question tokens and paragraphs, and answers."""

from typing import Any

import pytest
from models.etc_transformer.tiny_models import build
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea

PAIRS = [("w1 w2 w3", "w4 w5\n\nw6 w7 w8"), ("w9", "w10 w11 w12\n\nw13 w14")]


def encode(**options: Any) -> Any:
    return hea.structured_inputs(word_tokenizer(61, writes_end=True), PAIRS, **options)


def test_question_tokens_and_paragraphs_have_global_tokens() -> None:
    found = encode(has_whole_text=True)
    assert found["global_input_ids"].tolist() == [[1, 3, 3, 3, 5, 5], [1, 3, 5, 5, 1, 1]]
    assert found["global_token_type_ids"].tolist() == [[0, 5, 5, 5, 7, 7], [0, 5, 7, 7, 0, 0]]
    assert found["global_mask"].sum(1).tolist() == [6, 4]
    # question, text, end; a token of the text is of the whole and of its paragraph
    assert found["long_to_global"][0].tolist() == [
        *([1, -1], [2, -1], [3, -1]),
        *([0, 4], [0, 4], [0, 5], [0, 5], [0, 5]),
        [-1, -1],
    ]
    assert found["token_type_ids"][0].tolist() == [3, 3, 3, 1, 1, 1, 1, 1, 1]


def test_an_answer_is_tokens_and_a_paragraph() -> None:
    text = PAIRS[0][1]
    answers = [(text.index("w7"), text.index("w8") + 2), None]
    found = encode(answers=answers)
    assert [found[name].tolist() for name in ("start_positions", "end_positions")] == [[6, 0], [7, 0]]
    assert found["long_answer_positions"].tolist() == [4, -100]
    # cut away, at least its end
    cut = encode(answers=answers, max_length=8)
    assert cut["long_answer_positions"].tolist() == [-100, -100]
    assert cut["end_positions"].tolist() == [0, 0]
    model = build("AutoModelForQuestionAnswering", long_answers=True)
    outputs = model(**found)
    assert outputs.long_answer_logits.shape == (2, 5)
    assert outputs.loss.isfinite()
    # a batch in which no example has an answer
    assert model(**cut).loss.isfinite()


def test_candidates_have_ids_and_types_of_their_own() -> None:
    """WikiHop: the text lists the candidates w4 and w5 6, and then mentions w4 in its second paragraph."""
    text = "w4 w5 w6\n\nw7 w4 w8"
    at = text.index("w7 w4") + 3
    parts = [[(0, 2), (at, at + 2)], (3, 8), (at - 3, len(text))]
    pairs = [("w1 w2", text), ("w9", "w10 w11")]
    tokenizer = word_tokenizer(61, writes_end=True)
    options = {"contexts": [[0, 0, 1], [0]], "answers": [(0, 2), None]}
    found = hea.structured_inputs(tokenizer, pairs, [parts, [(0, 3)]], candidates=[[0, 1], []], **options)
    assert found["global_input_ids"].tolist() == [[3, 3, 4, 4, 5], [3, 5, 1, 1, 1]]
    assert found["global_token_type_ids"].tolist() == [[5, 5, 6, 6, 7], [5, 7, 0, 0, 0]]
    # the mention keeps the type of its paragraph, and is linked with both
    assert found["token_type_ids"][0].tolist() == [3, 3, 4, 4, 4, 1, 1, 1, 1]
    assert found["long_to_global"][0, 6].tolist() == [2, 4]
    assert found["global_contexts"][0].tolist() == [0, 0, 1, 1, 2]
    assert found["long_answer_positions"].tolist() == [2, -100]
    other = hea.structured_inputs(tokenizer, pairs, [parts, [(0, 3)]], candidates=[[1], [0]], candidate_token_id=42)
    assert other["global_input_ids"].tolist() == [[3, 3, 5, 42, 5], [3, 42, 1, 1, 1]]
    without = hea.structured_inputs(tokenizer, pairs, [parts, [(0, 3)]], **options)
    assert without["global_token_type_ids"][0].tolist() == [5, 5, 7, 7, 7]
    assert build("AutoModelForQuestionAnswering", long_answers=True)(**found).loss.isfinite()


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ([[0]], "candidates has 1 lists for 2 texts; give one for each text"),
        ([[0], [2]], r"candidates has \[2\] for a text of 2 parts; give numbers of parts, which are counted from 0"),
        ([[-1], []], r"candidates has \[-1\] for a text of 2 parts"),
    ],
)
def test_candidates_that_are_no_parts(candidates: Any, message: str) -> None:
    with pytest.raises(hea.InputError, match=message):
        encode(candidates=candidates)
    texts = [text for _, text in PAIRS]
    with pytest.raises(hea.InputError, match="candidates has 2 lists for texts without a question"):
        hea.structured_inputs(word_tokenizer(61, writes_end=True), texts, candidates=[[0], [0]])


def test_white_space_around_an_answer_is_none_of_it() -> None:
    text = PAIRS[0][1]
    for said in ("w5\n\n", " w5", " w5\n\nw6 "):
        start = text.index(said)
        found = encode(answers=[(start, start + len(said)), None])
        assert found["start_positions"].tolist() == [4, 0]
        assert found["end_positions"].tolist() == [5 if "w6" in said else 4, 0]
        assert found["long_answer_positions"].tolist() == [3, -100]
    begin = text.index("\n\n")
    with pytest.raises(hea.InputError, match=r"answers has \(5, 7\), which is .* no token has a letter of it"):
        encode(answers=[(begin, begin + 2), None])


def test_an_answer_of_which_an_end_is_cut_away_is_none() -> None:
    """At the left end, too, where a tokenizer cuts there."""
    tokenizer, text = word_tokenizer(61), PAIRS[0][1]
    tokenizer.truncation_side = "left"
    for said, expected in ((text, 0), ("w7 w8", 5)):
        answers = [(text.index(said), text.index(said) + len(said)), None]
        found = hea.structured_inputs(tokenizer, PAIRS, answers=answers, max_length=6)
        assert found["end_positions"].tolist() == [expected, 0]


def test_without_links_of_the_whole_text_and_with_other_ids() -> None:
    found = encode(question_token_ids=(41, 43), parts=[[(0, 5)], [(0, 3)]])
    assert found["global_input_ids"].tolist() == [[41, 41, 41, 43], [41, 43, 1, 1]]
    assert found["global_reads_all"].sum() == 0


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([("w1", "w2", "w3")], {}, "'w1'"),
        (["w1", ("w1", "w2")], {}, "'w1'"),
        ([3], {}, "texts has 3; give texts alone"),
        (["w1 w2"], {"answers": [(0, 2)]}, "answers has 1 of 1 texts"),
        (PAIRS, {"answers": [None]}, "answers has 1 of 2 pairs"),
        (PAIRS, {"answers": [{"start": 0, "end": 2}, None]}, "'end'"),
        (PAIRS, {"max_length": 3}, "max_length=3"),
        (["w1 w2"], {"parts": [(0, 3)]}, r"parts has 0; give \(start, stop\) in characters"),
        (["w1 w2"], {"parts": [[(0.0, 3.0)]]}, r"parts has \(0.0, 3.0\); give"),
        (["w1 w2"], {"parts": [None]}, "parts has 1 lists for 1 texts; give one for each text, with intervals"),
        (["w1 w2"], {"parts": 5}, "parts is 5 for 1 texts; give one for each text, with intervals"),
        (["w1 w2"], {"global_token_id": 0}, "Global tokens would be 0, which is the padding"),
        (PAIRS, {"question_token_ids": (3, 0)}, "Global tokens would be 0, which is the padding"),
        (PAIRS, {"answers": [(4, 400), None]}, r"answers has \(4, 400\); give \(start, stop\) in characters"),
    ],
)
def test_what_is_neither_texts_nor_pairs(texts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.InputError, match=message):
        hea.structured_inputs(word_tokenizer(61), texts, **options)
