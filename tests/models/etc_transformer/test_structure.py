"""Global tokens from texts, from chunks, and as a call gives them; what contradicts itself is refused."""

import re
from typing import Any

import pytest
import torch
from models.etc_transformer.tiny_models import build, random_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea
from hf_efficient_attn.models.etc_transformer import attention
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
def test_a_space_before_a_sentence_leaves_no_word_of_it_out(is_byte_level: bool) -> None:
    tokenizer = spaced_tokenizer(is_byte_level)
    found = hea.structured_inputs(tokenizer, [SPACED])
    for number, (start, stop) in enumerate(sentences(SPACED)):
        own = found["input_ids"][0][found["long_to_global"][0, :, 0] == number]
        assert tokenizer.decode(own).strip() == SPACED[start:stop]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_byte_level", [True, False])
def test_no_word_of_a_masked_sentence_can_be_read(is_byte_level: bool, seed: int) -> None:
    """In contrastive predictive coding."""
    tokenizer = spaced_tokenizer(is_byte_level)
    torch.manual_seed(seed)
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
    assert found["global_reads_all"].tolist() == [[1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
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


def test_a_hard_mask_lets_a_sentence_tell_of_itself_alone() -> None:
    """After one layer; the long tokens of another sentence know of it nevertheless."""
    model = build(num_hidden_layers=1, hard_global_to_long=True, local_radius=0)
    ids = random_ids(1, 8)
    changed = ids.clone()
    changed[0, 6] += 1 if changed[0, 6] < 60 else -1
    with torch.no_grad():
        one, other = model(ids), model(changed)
    assert torch.equal(one.global_hidden_state[0, 0], other.global_hidden_state[0, 0])
    assert not torch.allclose(one.global_hidden_state[0, 1], other.global_hidden_state[0, 1])


# which are warned of once
@pytest.mark.filterwarnings("ignore:output_attentions=True")
def test_a_hard_mask_lets_a_word_know_of_its_own_sentence_alone() -> None:
    """Nor of a global token that reads all words: `global_reads_all` opens the other direction."""
    model = build(hard_long_to_global=True, output_attentions=True)
    links = torch.zeros(1, 9, dtype=torch.long)
    given = {"global_input_ids": torch.ones(1, 2, dtype=torch.long), "global_reads_all": torch.tensor([[0, 1]])}
    with torch.no_grad():
        weights = model(random_ids(1, 9), long_to_global=links, **given).attentions[0]
    assert (weights[..., 0] > 0).all()
    assert (weights[..., 1] == 0).all()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"global_mask": torch.ones(2, 3)}, "without global_input_ids"),
    ({"global_input_ids": torch.ones(2, 3), "global_mask": torch.ones(2, 4)}, "global_mask has shape"),
    ({"global_input_ids": torch.ones(2, 3), "global_mask": torch.full((2, 3), 2)}, "global_mask holds 2"),
    ({"global_input_ids": torch.ones(3, 3)}, "global_input_ids has shape"),
    ({"global_input_ids": torch.ones(2)}, r"global_input_ids has shape \[2\]; it must be \[batch, global tokens\]"),
    ({"global_input_ids": torch.ones(2, 0)}, r"global_input_ids has shape \[2, 0\]"),
    ({"global_token_type_ids": torch.ones(2, 2)}, "global_token_type_ids given without global_input_ids"),
    ({"token_type_ids": torch.full((2, 6), 99)}, "token_type_ids has type 99, but type_vocab_size=16: types are 0"),
    ({"token_type_ids": torch.full((2, 6), -1)}, "token_type_ids has type -1, but type_vocab_size=16"),
    ({"token_type_ids": torch.zeros(2, 5)}, r"token_type_ids has shape \[2, 5\]; it must be \[2, 6\]"),
    (
        {"global_input_ids": torch.ones(2, 3), "global_token_type_ids": torch.full((2, 3), 50)},
        "global_token_type_ids has type 50, but type_vocab_size=16",
    ),
    (
        {"global_input_ids": torch.ones(2, 3), "global_token_type_ids": torch.ones(2, 5)},
        r"global_token_type_ids has shape \[2, 5\]",
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


def test_layers_keep_one_table_of_who_reads_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one each: with a global token for each so many tokens, a table grows with the square of their number."""
    tokens, chunk_tokens = 128, 4
    num_global = tokens // chunk_tokens
    # texts are then long enough for tiles
    monkeypatch.setattr(attention, "TILE_SCORES", 1_000)
    tables: dict[int, int] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if saved.dtype == torch.bool and storage.nbytes() >= tokens * num_global:
            tables[storage.data_ptr()] = storage.nbytes()
        return saved

    model = build(num_hidden_layers=4, chunk_tokens=chunk_tokens)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        model(random_ids(1, tokens))
    # who is a part of what, and who reads whom from global tokens; every long token reads all of these
    assert sorted(tables.values()) == [num_global * tokens, num_global * (num_global + tokens)]


def test_texts_that_cannot_be_taken_apart() -> None:
    with pytest.raises(hea.InputError, match="a fast tokenizer"):
        hea.structured_inputs(object(), TEXTS)
    with pytest.raises(hea.InputError, match="got 0 texts"):
        hea.structured_inputs(word_tokenizer(61), TEXTS[0])
    with pytest.raises(hea.InputError, match="None of the 1 texts has a token"):
        hea.structured_inputs(word_tokenizer(61), [" "])
    with pytest.raises(hea.InputError, match="parts has 1 lists for 2 texts"):
        encode(parts=[[]])
    with pytest.raises(hea.InputError, match=r"parts has \(3, 1\)"):
        encode(parts=[[(3, 1)], []])
