"""SentenceMaskingCollator: what is masked and predicted, and how an ETC learns from both on any number of processes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distributed import run_distributed
from models.etc_transformer.tiny_models import build
from tiny_bert import tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from training.cpc_script import fixed_trainer
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea

PAD, MASK, UNK = 0, 1, 2
SCRIPT = Path(__file__).parent / "cpc_script.py"


def subword_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of words over two letters, with a token for each letter."""
    vocab = {"[PAD]": PAD, "[MASK]": MASK, "[UNK]": UNK, "a": 3, "b": 4, "##a": 5, "##b": 6, ".": 7}
    raw = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = {"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **special)


def texts(num: int, sentences: int = 5) -> list[dict[str, Any]]:
    """Return texts of words of one to four letters, drawn at random."""
    torch.manual_seed(num)
    return [
        {
            "text": " ".join(
                " ".join(
                    "".join("ab"[int(letter)] for letter in torch.randint(2, (int(torch.randint(1, 5, ())),)))
                    for _ in range(6)
                )
                + "."
                for _ in range(sentences + row % 3)
            )
        }
        for row in range(num)
    ]


def collate(items: list[dict[str, Any]], **options: Any) -> Any:
    torch.manual_seed(0)
    return hea.SentenceMaskingCollator(subword_tokenizer(), **options)(items)


def test_sentences_are_masked_whole_and_words_are() -> None:
    batch = collate(texts(16), cpc_share=0.25)
    before, after, labels = batch["cpc_input_ids"], batch["input_ids"], batch["labels"]
    assert before.equal(hea.structured_inputs(subword_tokenizer(), [each["text"] for each in texts(16)])["input_ids"])
    links, chosen = batch["long_to_global"][..., 0], batch["cpc_mask"].bool()
    assert chosen.sum() == round(0.25 * batch["global_mask"].sum().item())
    assert not (chosen & ~batch["global_mask"].bool()).any()
    inside = chosen.gather(1, links.clamp(min=0)) & (links >= 0)
    assert (after[inside] == MASK).all()
    predicted = labels != -100
    assert not (predicted & (inside | (before == PAD))).any()
    assert labels[predicted].equal(before[predicted])
    assert after[~predicted & ~inside].equal(before[~predicted & ~inside])
    for row in range(16):
        words = batch.word_ids(row)
        for number in {word for word in words if word is not None}:
            of_word = torch.tensor([word == number for word in words])
            assert predicted[row][of_word].unique().numel() == 1
    # more than a word in three has several tokens
    assert 0.09 < predicted.sum() / (~inside & (before != PAD)).sum() < 0.21


def test_tokens_to_predict_are_masked_replaced_or_left() -> None:
    batch = collate(texts(60, 12), mlm_share=1.0, cpc_share=0.0)
    real = batch["attention_mask"].bool()
    assert batch["labels"][real].ge(0).all()
    assert "cpc_mask" not in batch
    is_mask, is_left = batch["input_ids"][real] == MASK, batch["input_ids"] == batch["labels"]
    # a token drawn at random may be the mask, or the token itself: one in eight each
    assert is_mask.float().mean() == pytest.approx(0.8 + 0.1 / 8, abs=0.02)
    assert is_left[real].float().mean() == pytest.approx(0.1 + 0.1 / 8, abs=0.02)


def test_small_batches_have_something_to_predict_and_no_sentence_alone() -> None:
    """A text is a sentence of a word, and one word is predicted; of four sentences two are masked, of three none."""
    for num, masked in ((1, 0), (3, 0), (4, 2), (7, 2)):
        batch = collate([{"text": "ab"}] * num, mlm_share=1e-9)
        assert batch["cpc_mask"].sum() == masked
        assert (batch["labels"] != -100).any(1).sum() == 1


def test_parts_within_each_other() -> None:
    """Where the parts that are masked are all of the text, none is; the token of a whole text never is."""
    item = {"text": "a a a a b b b b", "parts": [(0, 15)] * 6}
    batch = collate([item], cpc_share=0.5, has_whole_text=True)
    assert batch["cpc_mask"].tolist() == [[0] * 7]
    assert (batch["labels"] != -100).any()
    batch = collate(
        [{**item, "parts": [(0, 4), (4, 8), (8, 12), (8, 15)]}], cpc_share=0.5, cpc_token_id=UNK, has_whole_text=True
    )
    assert batch["cpc_mask"].sum() == 2
    assert not batch["cpc_mask"][0, 0]
    assert (batch["input_ids"] == UNK).any()


@pytest.mark.parametrize(
    ("options", "items", "message"),
    [
        ({"mlm_share": 0.0}, [{"text": "a"}], "mlm_share=0"),
        ({"cpc_share": 0.6}, [{"text": "a"}], "at most 0.5"),
        ({}, [{"input_ids": [3]}], "remove_unused_columns=False"),
        ({}, ["a"], "An item has str and no text"),
        ({}, [{"text": "a", "parts": [(0, 1)]}, {"text": "a"}], "Give all of them, or none"),
        ({}, [{"text": ""}, {"text": ""}], "None of the 2 texts has a token"),
    ],
)
def test_what_is_refused(options: dict[str, Any], items: list[Any], message: str) -> None:
    with pytest.raises(hea.InputError, match=message):
        collate(items, **options)


def test_texts_without_words_are_refused() -> None:
    """Where a tokenizer writes tokens around them."""
    with pytest.raises(hea.InputError, match="The 2 texts of a batch have no word that could be masked"):
        hea.SentenceMaskingCollator(tiny_tokenizer())([{"text": ""}, {"text": " "}])


def test_tokenizers_need_a_mask() -> None:
    tokenizer = word_tokenizer(20)
    tokenizer.mask_token = None
    with pytest.raises(hea.InputError, match="has no mask token. Add one"):
        hea.SentenceMaskingCollator(tokenizer)


def test_masked_sentences_are_told_apart_by_the_theme_of_their_text() -> None:
    """Of eight texts with words of their own; those of one text are too much alike."""
    model = build("AutoModelForMaskedLM", cpc_loss_weight=0.25, local_radius=8).train()
    items = [{"text": " ".join(f"w{2 * row + word % 2} w{2 * row}." for word in range(5))} for row in range(8)]
    collator = hea.SentenceMaskingCollator(word_tokenizer(61), cpc_share=0.25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    seen = []
    for _ in range(24):
        out = model(**collator(items))
        seen.append(4 * out.auxiliary_loss.item())
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    # ten sentences are masked at a time
    assert seen[0] == pytest.approx(math.log(10), rel=0.15)
    assert sum(seen[-4:]) / 4 < 0.75 * seen[0]


def test_accumulated_batches_have_the_share_of_their_predicted_tokens(tmp_path: Path) -> None:
    """One step of plain gradient descent, against both losses added up by hand."""
    trainer, batches = fixed_trainer(tmp_path, world=1)
    start = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    by_hand = fixed_trainer(tmp_path, world=1)[0].model
    counts = [int((batch["labels"] != -100).sum()) for batch in batches]
    assert counts[0] != counts[1]
    for batch, count in zip(batches, counts, strict=True):
        labels = batch["labels"]
        out = by_hand(**{name: each for name, each in batch.items() if name != "labels"})
        total = cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        assert out.auxiliary_loss > 0
        ((total + count * out.auxiliary_loss) / sum(counts)).backward()
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        moved = start[name] - dict(by_hand.named_parameters())[name].grad
        torch.testing.assert_close(parameter.detach(), moved, atol=1e-6, rtol=1e-5)


def test_two_processes_take_the_step_of_one_that_accumulates(tmp_path: Path) -> None:
    trainer, _ = fixed_trainer(tmp_path, world=1)
    trainer.train()
    run_distributed(SCRIPT, tmp_path)
    found = torch.load(tmp_path / "two.pt")
    for name, each in trainer.model.state_dict().items():
        torch.testing.assert_close(found[name], each, atol=1e-6, rtol=1e-5)
