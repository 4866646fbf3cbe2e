"""Collators and segments: texts row by row, aligned sentences, masked words and sentences; and who trains with them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate.data_loader import BatchSamplerShard
from families import BY_NAME
from models.etc_transformer.tiny_models import build
from models_cases import trainer_arguments
from seq2seq_cases import random_ids
from tiny_bert import tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from training.span_runs import build_trainer
from training.tiny_models import one_block
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea

TOKENS, SEGMENT = 103, 5


def read(num_rows: int, processes: int = 1, split_batches: bool = False) -> list[list[dict[str, torch.Tensor]]]:
    """Return the batches of each process, dealt out as accelerate does."""
    segments = hea.TextSegments(torch.arange(TOKENS), num_rows, SEGMENT)
    batch_size = num_rows if split_batches else num_rows // processes
    dealt = []
    for process in range(processes):
        batches = BatchSampler(SequentialSampler(segments), batch_size, drop_last=False)
        shard = BatchSamplerShard(batches, processes, process, split_batches=split_batches)
        dealt.append(list(DataLoader(segments, batch_sampler=shard, collate_fn=hea.SegmentCollator())))
    return dealt


@pytest.mark.parametrize("split_batches", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_rows_go_on_on_every_process(processes: int, split_batches: bool) -> None:
    """Joined over its batches, row j of process p is a contiguous piece of the text: the (p · rows + j)-th."""
    num_rows = 2 * processes
    row_tokens = TOKENS // num_rows
    num_segments = (row_tokens - 1) // SEGMENT
    for process, batches in enumerate(read(num_rows, processes, split_batches)):
        assert [batch["segment_index"].tolist() for batch in batches] == [[i, i] for i in range(num_segments)]
        for row in range(2):
            inputs, targets = (
                torch.cat([batch[name][row] for batch in batches]).tolist() for name in ("input_ids", "shift_labels")
            )
            first = (2 * process + row) * row_tokens
            assert inputs == list(range(first, first + num_segments * SEGMENT))
            assert targets == [token + 1 for token in inputs]


def test_every_target_counts_once() -> None:
    """All tokens of a row but its first, and a tail shorter than a segment, are predicted exactly once."""
    (batches,) = read(num_rows=4)
    targets = torch.cat([batch["shift_labels"].flatten() for batch in batches]).tolist()
    assert len(targets) == len(set(targets))
    # 25 tokens a row: four segments of five, and the first token of the fifth as the last target
    assert sorted(targets) == [row * 25 + place for row in range(4) for place in range(1, 21)]


def test_items_are_what_they_say() -> None:
    segments = hea.TextSegments(list(range(TOKENS)), 4, SEGMENT)
    assert len(segments) == 16
    item = segments[4 * 2 + 3]
    assert item["segment_index"] == 2
    assert item["input_ids"].tolist() == list(range(85, 90))
    assert item["labels"].tolist() == list(range(86, 91))
    for index in (16, -1):
        with pytest.raises(IndexError, match="0 to 15"):
            segments[index]


def test_bytes_are_kept_as_bytes() -> None:
    text = torch.frombuffer(bytearray(b"attention " * 20), dtype=torch.uint8)
    segments = hea.TextSegments(text, 2, 16)
    assert segments.rows.dtype == torch.uint8
    assert segments.rows.data_ptr() == text.data_ptr()
    assert segments[0]["input_ids"].dtype == torch.int64


def tiny_model() -> hea.SimplifiedTransformerForCausalLM:
    torch.manual_seed(0)
    return one_block(vocab_size=TOKENS)


def watch(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return a list that fills with what the model is given, its logits and its loss, forward by forward."""
    seen: list[dict[str, Any]] = []

    def keep(module: torch.nn.Module, args: Any, given: dict[str, Any], outputs: Any) -> None:
        seen.append({**given, "loss": outputs["loss"].detach(), "logits": outputs["logits"].detach()})

    model.register_forward_hook(keep, with_kwargs=True)
    return seen


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_reads_on_and_counts_all_targets(tmp_path: Path, accumulation: int) -> None:
    """Loss = mean over all M targets of each row, whatever is accumulated; after the last segment comes the first."""
    model = tiny_model()
    seen = watch(model)
    options = {"gradient_accumulation_steps": accumulation, "max_steps": 6 // accumulation}
    build_trainer(tmp_path, model, hea.TextSegments(torch.arange(TOKENS), 4, SEGMENT), **options).train()
    assert [forward["input_ids"][0, 0].item() for forward in seen] == [0, 5, 10, 15, 0, 5]
    for forward in seen:
        assert int(forward["num_items_in_batch"]) == 4 * SEGMENT * accumulation
        nats = torch.nn.functional.cross_entropy(forward["logits"].flatten(0, 1), forward["input_ids"].flatten() + 1)
        torch.testing.assert_close(forward["loss"] * accumulation, nats)


def test_shuffled_items_are_refused() -> None:
    items = [hea.TextSegments(torch.arange(TOKENS), 2, SEGMENT)[index] for index in (0, 5)]
    with pytest.raises(hea.InputError, match=r"segments, \[0, 2\].*sequential"):
        hea.SegmentCollator()(items)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(4, 5, dtype=torch.long), 1, 2), r"\[4, 5\] and dtype torch.int64"),
        ((torch.zeros(40), 1, 2), "float32"),
        ((torch.arange(40), 0, 2), "num_rows=0"),
        ((torch.arange(40), 2, 0), "segment_tokens=0"),
        ((torch.arange(40), 4, 10), "44 are needed"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(hea.InputError, match=message):
        hea.TextSegments(*arguments)


END = 7


def item(source: list[int], target: list[int], kind: Any = list) -> dict[str, Any]:
    """Return a document of sentences of so many tokens, and its translation."""
    found: dict[str, Any] = {}
    for ids, numbers, lengths in (("input_ids", "sentence_ids", source), ("labels", "decoder_sentence_ids", target)):
        found[ids] = kind(random_ids(1, sum(lengths), seed=sum(lengths))[0].tolist())
        found[numbers] = kind([number for number, length in enumerate(lengths) for _ in range(length)])
    return found


def padding_tokenizer(side: str) -> Any:
    found = word_tokenizer(61)
    found.padding_side = side
    return found


# of labels in arrays, by transformers
@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy.ndarrays")
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize("side", ["left", "right"])
def test_numbers_are_padded_with_their_tokens(side: str, kind: Any) -> None:
    model = BY_NAME["bp-seq2seq"].model("AutoModelForSeq2SeqLM")
    items = [item([2, 3], [1, 3], kind), item([1, 2, 1], [2], kind)]
    collator = hea.AlignedSentencesCollator(padding_tokenizer(side), model=model, pad_to_multiple_of=3)
    batch = collator(items)
    assert batch["sentence_ids"].shape == (2, 6)
    assert batch["decoder_sentence_ids"].shape == (2, 6)
    for row, own in enumerate(items):
        for name, is_token in (
            ("sentence_ids", batch["attention_mask"][row] == 1),
            ("decoder_sentence_ids", batch["labels"][row] != -100),
        ):
            assert batch[name][row][is_token].tolist() == list(own[name])
            assert (batch[name][row][~is_token] == -1).all()
    without = {"sentence_ids", "decoder_sentence_ids"}
    plain = [{name: each for name, each in own.items() if name not in without} for own in items]
    padded = {
        each: transformers.DataCollatorForSeq2Seq(padding_tokenizer(each), model=model, pad_to_multiple_of=3)(plain)
        for each in ("right", side)
    }
    # a decoder would read padding before its labels
    expected = {**padded[side], **{name: padded["right"][name] for name in ("labels", "decoder_input_ids")}}
    assert batch.keys() - without == expected.keys() == collator(plain).keys()
    assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_sources_without_labels_have_the_numbers_of_their_own() -> None:
    items = [item([2, 3], [1]), item([1, 2], [1])]
    batch = hea.AlignedSentencesCollator(padding_tokenizer("left"))(
        [{name: own[name] for name in ("input_ids", "sentence_ids")} for own in items]
    )
    assert "decoder_sentence_ids" not in batch
    assert batch["sentence_ids"].tolist() == [[0, 0, 1, 1, 1], [-1, -1, 0, 1, 1]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    """The logits of a document beside a longer one are those that it has alone."""
    model = BY_NAME["bp-seq2seq"].model("AutoModelForSeq2SeqLM")
    items = [item([2, 3], [1, 3]), item([4, 2, 3], [2, 4])]
    collator = hea.AlignedSentencesCollator(padding_tokenizer(side))
    with torch.no_grad():
        logits = model(**collator(items)).logits
        for row, own in enumerate(items):
            alone = model(**collator([own])).logits[0]
            torch.testing.assert_close(logits[row, : len(alone)], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_model", [True, False])
def test_trainer_trains_evaluates_and_generates(has_model: bool, tmp_path: Path) -> None:
    model = BY_NAME["bp-seq2seq"].model("AutoModelForSeq2SeqLM", sentence_end_token_id=END)
    items = [item([2, 3], [1, 3]), item([1, 2, 1], [2]), item([4], [1, 1, 1, 2]), item([2, 2], [2, 3])]
    # the first sentence of a source need not be its 0th
    items[3]["sentence_ids"] = [5, 5, 6, 6]
    items[3]["decoder_sentence_ids"] = [5, 5, 6, 6, 6]
    written = []

    def metrics(prediction: transformers.EvalPrediction) -> dict[str, float]:
        written.append(prediction.predictions)
        return {"tokens": float((prediction.predictions > 2).sum())}

    args = trainer_arguments(
        tmp_path,
        transformers.Seq2SeqTrainingArguments,
        max_steps=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        predict_with_generate=True,
        generation_max_length=8,
    )
    collator = hea.AlignedSentencesCollator(padding_tokenizer("right"), model=model if has_model else None)
    trainer = transformers.Seq2SeqTrainer(
        model, args, train_dataset=items, eval_dataset=items, data_collator=collator, compute_metrics=metrics
    )
    assert np.isfinite(trainer.train().training_loss)
    measured = trainer.evaluate()
    model.eval()
    # generation knows the sentences of the sources alone
    batch = collator(items)
    named = {name: batch[name] for name in ("input_ids", "attention_mask", "sentence_ids")}
    expected = model.generate(**named, max_length=8, do_sample=False)
    assert np.array_equal(written[0][:, : expected.shape[1]], expected.numpy())
    with torch.no_grad():
        assert measured["eval_loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_sentence_ids": None}, "decoder_sentence_ids"),
        ({"sentence_ids": None, "decoder_sentence_ids": None}, "sentence_ids"),
        ({"sentence_ids": [0] * 4}, "sentence_ids"),
        ({"sentence_ids": [0.0] * 5}, "sentence_ids"),
        ({"decoder_sentence_ids": 3}, "decoder_sentence_ids=3"),
    ],
)
def test_what_is_no_number_of_each_token(change: dict[str, Any], message: str) -> None:
    items = [item([2, 3], [1, 3]), item([2, 3], [1, 3]) | change]
    with pytest.raises(hea.InputError, match=message):
        hea.AlignedSentencesCollator(padding_tokenizer("right"))(items)


PAD, MASK, UNK = 0, 1, 2


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
        ({}, ["a"], "An item has str"),
        ({}, [{"text": "a", "parts": [(0, 1)]}, {"text": "a"}], "Give it to all items"),
        ({}, [{"text": ""}, {"text": ""}], "2 texts"),
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


def batches_of_unlike_lengths() -> list[dict[str, Any]]:
    """Return two batches of unlike length, made by the collator."""
    collate = hea.SentenceMaskingCollator(word_tokenizer(61), mlm_share=0.4, cpc_share=0.3, global_token_id=5)
    torch.manual_seed(0)
    found = []
    for sentences in (4, 7):
        rows = torch.randint(50, (2, sentences, 4)).tolist()
        items = [{"text": " ".join(" ".join(f"w{word}" for word in each) + " ." for each in row)} for row in rows]
        found.append(dict(collate(items)))
    return found


def fixed_trainer(folder: Path) -> tuple[transformers.Trainer, list[dict[str, Any]]]:
    """Return a trainer of one step over both batches, and the batches."""
    fixed = batches_of_unlike_lengths()
    model = build("AutoModelForMaskedLM", cpc_loss_weight=0.25)
    args = trainer_arguments(
        folder / "trainer",
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=len(fixed),
        train_sampling_strategy="sequential",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        remove_unused_columns=False,
        logging_strategy="no",
    )
    trainer = transformers.Trainer(
        model,
        args,
        train_dataset=fixed,
        # an item is a batch
        data_collator=lambda items: items[0],
        optimizers=(torch.optim.SGD(model.parameters(), lr=1.0), None),
    )
    return trainer, fixed


def test_accumulated_batches_have_the_share_of_their_predicted_tokens(tmp_path: Path) -> None:
    """One step of plain gradient descent, against both losses added up by hand."""
    trainer, batches = fixed_trainer(tmp_path)
    start = {name: each.detach().clone() for name, each in trainer.model.named_parameters()}
    by_hand = fixed_trainer(tmp_path)[0].model
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
