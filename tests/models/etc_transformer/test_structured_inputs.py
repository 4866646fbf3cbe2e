"""Texts, questions and entities as inputs of an ETC: global tokens, links, contexts and answers."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from models.etc_transformer.dense_etc import Text, dense_etc
from models.etc_transformer.tiny_models import build, random_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea
from hf_efficient_attn.models.etc_transformer.global_input import find_chunks
from hf_efficient_attn.models.etc_transformer.structured_inputs import paragraphs, sentences

SPACED = "w1 w2. w3 w4 w5! w6 w7. w8 w9."
TEXTS = ["w1 w2. w3 w4 w5!\n\nw6 w7", "w8 w9"]


def encode(**options: Any) -> Any:
    return hea.structured_inputs(word_tokenizer(61), TEXTS, **options)


def test_every_sentence_has_a_global_token() -> None:
    found = encode()
    assert found["global_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    links = found["long_to_global"][..., 0]
    for row, text in enumerate(TEXTS):
        counts = torch.bincount(links[row][links[row] >= 0], minlength=3)
        assert (counts > 0).tolist() == found["global_mask"][row].bool().tolist()
        # in the order of the text, padding and special tokens in none
        real = links[row][links[row] >= 0]
        assert real.tolist() == sorted(real.tolist())
        assert len(sentences(text)) == int(found["global_mask"][row].sum())
    with torch.no_grad():
        assert build()(**found).global_hidden_state.shape == (2, 3, 32)


def spaced_tokenizer(is_byte_level: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words that begin with the space before them, in their offsets, too."""
    splits = pre_tokenizers.ByteLevel(add_prefix_space=False) if is_byte_level else pre_tokenizers.Metaspace()
    words = ["[PAD]", "[MASK]", *sorted({piece for piece, _ in splits.pre_tokenize_str(SPACED)})]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    raw.pre_tokenizer = splits
    raw.decoder = decoders.ByteLevel() if is_byte_level else decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", mask_token="[MASK]")


@pytest.mark.parametrize("is_byte_level", [True, False])
def test_no_word_of_a_masked_sentence_can_be_read(is_byte_level: bool) -> None:
    """In contrastive predictive coding."""
    tokenizer = spaced_tokenizer(is_byte_level)
    torch.manual_seed(0)
    batch = hea.SentenceMaskingCollator(tokenizer, mlm_share=1e-9, cpc_share=0.5)([{"text": SPACED}])
    chosen = batch["cpc_mask"][0].nonzero().flatten().tolist()
    assert len(chosen) == 2
    hidden = [word for number in chosen for word in re.findall(r"w\d", SPACED[slice(*sentences(SPACED)[number])])]
    masked = batch["input_ids"][0] == tokenizer.mask_token_id
    for token, is_masked in zip(batch["cpc_input_ids"][0].tolist(), masked.tolist(), strict=True):
        assert is_masked or tokenizer.decode([token]).strip() not in hidden


def test_parts_lie_within_parts_and_a_first_token_stands_for_all() -> None:
    parts = [[*paragraphs(text), *sentences(text)] for text in TEXTS]
    found = encode(parts=parts, has_whole_text=True)
    assert found["global_attends_to_all"].tolist() == [[1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    # of the first word: the text, its first paragraph, its first sentence
    first = next(row for row in found["long_to_global"][0].tolist() if row[0] >= 0)
    assert first == [0, 1, 3]
    cut = encode(parts=parts, has_whole_text=True, max_length=3)
    assert cut["global_mask"].sum(1).tolist() == [4, 3]


def test_empty_lines_divide_paragraphs() -> None:
    """However many they are: a run of white space costs time once, not once for each of its characters."""
    text = "\n a b \r\n\r\n  c\nd\n \n\n e  "
    assert [text[start:stop] for start, stop in paragraphs(text)] == ["a b", "c\nd", "e"]
    long = "a" + " " * 500_000 + "b"
    assert paragraphs(long) == [(0, len(long))]
    assert paragraphs(" \n\n ") == []


def test_chunks_are_counted_over_the_real_tokens_of_a_document() -> None:
    states, real = torch.zeros(2, 7, 1), torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]).bool()
    found = find_chunks(hea.EtcTransformerConfig(chunk_tokens=3), states, real, None)
    assert found.links[..., 0].tolist() == [[-1, -1, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1, 2]]
    assert found.real.tolist() == [[True, True, False], [True, True, True]]
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]])
    packed = find_chunks(hea.EtcTransformerConfig(chunk_tokens=2, spare_chunks=1), states, real, documents)
    assert packed.links[..., 0].tolist() == [[-1, -1, 0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2, 3]]
    assert packed.documents.tolist() == [[0, 1, 1, -1, -1], [0, 0, 0, 0, -1]]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"global_mask": torch.ones(2, 3)}, "without global_input_ids"),
    ({"global_input_ids": torch.ones(2, 3), "global_mask": torch.ones(2, 4)}, "global_mask has shape"),
    ({"global_input_ids": torch.ones(2, 3), "global_mask": torch.full((2, 3), 2)}, "global_mask holds 2"),
    ({"global_input_ids": torch.ones(2)}, r"global_input_ids has shape \[2\]; it must be \[batch, global tokens\]"),
    ({"global_token_type_ids": torch.ones(2, 2)}, "global_token_type_ids given without global_input_ids"),
    ({"token_type_ids": torch.full((2, 6), 99)}, "token_type_ids has type 99, but type_vocab_size=16: types are 0"),
    (
        {"global_input_ids": torch.ones(2, 3), "global_token_type_ids": torch.full((2, 3), 50)},
        "global_token_type_ids has type 50, but type_vocab_size=16",
    ),
    ({"global_input_ids": torch.ones(2, 3), "long_to_global": torch.ones(2, 3)}, "long_to_global has shape"),
    ({"global_input_ids": torch.ones(2, 3), "long_to_global": torch.full((2, 6), 3)}, "long_to_global holds 3"),
    (
        {"global_input_ids": torch.ones(2, 3), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
        "rows hold packed documents",
    ),
    ({"cpc_mask": torch.ones(2, 2)}, "cpc_loss_weight=0"),
]


@pytest.mark.parametrize(("inputs", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_inputs_that_contradict_each_other(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.InputError, match=message):
        build()(random_ids(2, 6), **{name: each.long() for name, each in inputs.items()})


def test_texts_that_cannot_be_taken_apart() -> None:
    with pytest.raises(hea.InputError, match="a fast tokenizer"):
        hea.structured_inputs(object(), TEXTS)
    with pytest.raises(hea.InputError, match="got 0 texts"):
        hea.structured_inputs(word_tokenizer(61), TEXTS[0])
    with pytest.raises(hea.InputError, match="The 1 texts have no tokens"):
        hea.structured_inputs(word_tokenizer(61), [" "])
    with pytest.raises(hea.InputError, match="parts has 1 lists for 2 texts"):
        encode(parts=[[]])
    with pytest.raises(hea.InputError, match=r"parts has \(3, 1\)"):
        encode(parts=[[(3, 1)], []])


# w3 is an entity of three mentions, the last of two words; w6 one of a single mention
TEXT = "w3 w4. w5 w6 w3! w7 w3 w8."
W3, W6 = [(0, 2), (13, 15), (20, 26)], [(10, 12)]
PARTS = [*sentences(TEXT), W3, W6]
LINKS = [{0, 3}, {0}, {1}, {1, 4}, {1, 3}, {2}, {2, 3}, {2, 3}]
QUESTION, NUM_WORDS = "w9 w10", 4


def encode_text(texts: Any, side: str = "right", **options: Any) -> Any:
    tokenizer = word_tokenizer(61)
    tokenizer.padding_side = side
    return hea.structured_inputs(tokenizer, texts, **options)


def links_of_row(found: Any, row: int) -> list[set[int]]:
    """Return the links of the real tokens of a row, and check that padding has none."""
    real = found["attention_mask"][row].bool()
    assert (found["long_to_global"][row][~real] == -1).all()
    return [{number for number in numbers if number >= 0} for numbers in found["long_to_global"][row][real].tolist()]


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_entity_has_one_global_token_for_all_of_its_mentions(side: str) -> None:
    found = encode_text(["w1", TEXT], side, parts=[[[(0, 2)]], PARTS])
    assert links_of_row(found, 0) == [{0}]
    assert links_of_row(found, 1) == LINKS
    assert found["global_mask"].tolist() == [[1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert "global_contexts" not in found


def test_mentions_overlap_and_come_in_any_order() -> None:
    """A token that is in two mentions of an entity is linked once."""
    found = encode_text([TEXT], parts=[[*sentences(TEXT), [(20, 26), (20, 22), (0, 2), (13, 15)], W6]])
    assert links_of_row(found, 0) == LINKS
    assert found["long_to_global"].shape == (1, 8, 2)


def test_an_entity_of_which_every_mention_is_cut_away_has_no_global_token() -> None:
    found = encode_text([TEXT], parts=[PARTS], max_length=3, has_whole_text=True)
    # the whole text, the first two sentences, and w3, of which a mention is left
    assert links_of_row(found, 0) == [{0, 1, 3}, {0, 1}, {0, 2}]
    assert found["global_mask"].tolist() == [[1, 1, 1, 1]]
    contexts = encode_text([TEXT], parts=[PARTS], max_length=3, contexts=[[0, 0, 0, 1, 2]])["global_contexts"]
    assert contexts.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_entities_beside_a_question(side: str) -> None:
    """Its answer is in the part in one of whose mentions it begins."""
    pairs, begin = [("w1", "w2"), (QUESTION, TEXT)], TEXT.index("w8")
    answers = [None, (begin, begin + 2)]
    options: dict[str, Any] = {"parts": [[], [W6, W3, (20, 26)]], "answers": answers, "has_whole_text": True}
    found = encode_text(pairs, side, contexts=[[], [5, 3, 3]], **options)
    assert links_of_row(found, 0) == [{1}, {0}]
    # whole text 0, question 1 and 2, W6 3, W3 4, the last words 5
    of_text = [{0, 4}, {0}, {0}, {0, 3}, {0, 4}, {0}, {0, 4, 5}, {0, 4, 5}]
    assert links_of_row(found, 1) == [{1}, {2}, *of_text]
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
    found = encode_text([TEXT], parts=[PARTS], contexts=[[4, 4, 4, 2, 7]])
    text = Text(found["input_ids"][0].tolist(), [1] * 5, LINKS, [0, 0, 0, 1, 2])
    with torch.no_grad():
        long, globals_ = dense_etc(model, text)
        states = model(**found)
    torch.testing.assert_close(states.last_hidden_state[0], long)
    torch.testing.assert_close(states.global_hidden_state[0], globals_)


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        ([], r"\[\]"),
        ([(0, 2), (5, 5)], r"\[\(0, 2\), \(5, 5\)\]"),
        ({"w3": (0, 2)}, "{'w3': "),
        (torch.tensor([0.0, 2.0]), r"tensor\(\[0\., 2\.\]\)"),
    ],
)
def test_what_is_neither_an_interval_nor_mentions(part: Any, shown: str) -> None:
    with pytest.raises(hea.InputError, match=f"parts has {shown}.*for an entity, a list of at least one such interval"):
        encode_text([TEXT], parts=[[(0, 2), part]])


@pytest.mark.parametrize("kind", [torch.tensor, np.array, lambda numbers: list(np.array(numbers))])
def test_whole_numbers_of_any_kind(kind: Any) -> None:
    """Intervals, contexts, candidates and answers may be tensors, arrays, or lists of numbers of these."""
    pairs = [(QUESTION, TEXT)]
    options = {"has_whole_text": True, "answers": [(3, 5)], "contexts": [[1] * 5], "candidates": [[3, 4]]}
    expected = encode_text(pairs, parts=[PARTS], **options)
    parts = [*map(kind, sentences(TEXT)), kind(W3), [kind(W6[0])]]
    given = {name: [kind(each) for each in options[name]] for name in ("answers", "contexts", "candidates")}
    found = encode_text(pairs, parts=[parts], **{**options, **given})
    # a tensor for each text, all of whose parts are intervals
    whole = encode_text([TEXT], parts=[kind(sentences(TEXT))])
    for one, other in ((found, expected), (whole, encode_text([TEXT]))):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(
    ("contexts", "message"),
    [
        (3, "contexts is 3 for 1 texts; give one list for each text"),
        ([[0, 0, 0]], r"contexts has \[0, 0, 0\] for a text of 5 parts; give an integer for each"),
        ([[0, 0, 0, 0, 1.0]], r"contexts has \[0, 0, 0, 0, 1.0\] for a text of 5 parts"),
        ([[0, 1, 0, 2, 2]], r"contexts has \[0, 1, 0, 2, 2\], but the parts of each context must"),
    ],
)
def test_contexts_that_are_not_those_of_the_parts(contexts: Any, message: str) -> None:
    with pytest.raises(hea.InputError, match=message):
        encode_text([TEXT], parts=[PARTS], contexts=contexts)


PAIRS = [("w1 w2 w3", "w4 w5\n\nw6 w7 w8"), ("w9", "w10 w11 w12\n\nw13 w14")]


def encode_pairs(**options: Any) -> Any:
    return hea.structured_inputs(word_tokenizer(61, writes_end=True), PAIRS, **options)


def test_question_tokens_and_paragraphs_have_global_tokens() -> None:
    found = encode_pairs(has_whole_text=True)
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
    found = encode_pairs(answers=answers)
    assert [found[name].tolist() for name in ("start_positions", "end_positions")] == [[6, 0], [7, 0]]
    assert found["long_answer_positions"].tolist() == [4, -100]
    # cut away, at least its end
    cut = encode_pairs(answers=answers, max_length=8)
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
        ([[0]], "candidates has 1 lists for 2 texts; give one list for each text"),
        ([[0], [2]], r"candidates has \[2\] for a text of 2 parts; give indices of parts"),
    ],
)
def test_candidates_that_are_no_parts(candidates: Any, message: str) -> None:
    with pytest.raises(hea.InputError, match=message):
        encode_pairs(candidates=candidates)
    texts = [text for _, text in PAIRS]
    with pytest.raises(hea.InputError, match="candidates has 2 lists for texts without a question"):
        hea.structured_inputs(word_tokenizer(61, writes_end=True), texts, candidates=[[0], [0]])


def test_white_space_around_an_answer_is_none_of_it() -> None:
    text = PAIRS[0][1]
    for answer in ("w5\n\n", " w5", " w5\n\nw6 "):
        start = text.index(answer)
        found = encode_pairs(answers=[(start, start + len(answer)), None])
        assert found["start_positions"].tolist() == [4, 0]
        assert found["end_positions"].tolist() == [5 if "w6" in answer else 4, 0]
        assert found["long_answer_positions"].tolist() == [3, -100]
    begin = text.index("\n\n")
    with pytest.raises(hea.InputError, match=r"answers has \(5, 7\), which is .* no token covers these"):
        encode_pairs(answers=[(begin, begin + 2), None])


def test_an_answer_of_which_an_end_is_cut_away_is_none() -> None:
    """At the left end, too, where a tokenizer cuts there."""
    tokenizer, text = word_tokenizer(61), PAIRS[0][1]
    tokenizer.truncation_side = "left"
    for answer, expected in ((text, 0), ("w7 w8", 5)):
        answers = [(text.index(answer), text.index(answer) + len(answer)), None]
        found = hea.structured_inputs(tokenizer, PAIRS, answers=answers, max_length=6)
        assert found["end_positions"].tolist() == [expected, 0]


def test_without_links_of_the_whole_text_and_with_other_ids() -> None:
    found = encode_pairs(question_token_ids=(41, 43), parts=[[(0, 5)], [(0, 3)]])
    assert found["global_input_ids"].tolist() == [[41, 41, 41, 43], [41, 43, 1, 1]]
    assert found["global_attends_to_all"].sum() == 0


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([("w1", "w2", "w3")], {}, "'w1'"),
        ([3], {}, "texts has 3; give only texts"),
        (["w1 w2"], {"answers": [(0, 2)]}, "answers has 1 of 1 texts"),
        (PAIRS, {"answers": [{"start": 0, "end": 2}, None]}, "'end'"),
        (PAIRS, {"max_length": 3}, "max_length=3"),
        (["w1 w2"], {"parts": [(0, 3)]}, r"parts has 0; each part must be \(start, stop\) in characters"),
        (["w1 w2"], {"parts": 5}, "parts is 5 for 1 texts; give one list for each text, with intervals"),
        (PAIRS, {"question_token_ids": (3, 0)}, "Global tokens would have the id 0, which is the padding"),
        (PAIRS, {"answers": [(4, 400), None]}, r"answers has \(4, 400\); give \(start, stop\) in characters"),
    ],
)
def test_what_is_neither_texts_nor_pairs(texts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.InputError, match=message):
        hea.structured_inputs(word_tokenizer(61), texts, **options)
