"""A tokenizer for a new model, trained on its texts."""

from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


def new_tokenizer(texts: Iterable[str], vocab_size: int, ends: str = "<s> $A </s>") -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, trained on the first 8 MB of the texts.

    Args:
        ends: template of a text with its special tokens; "$A </s>" for an encoder-decoder, "$A" for a decoder.
    """
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    learned.train_from_iterator(_first(texts, num_characters=8_000_000), trainer)
    learned.post_processor = processors.TemplateProcessing(
        single=ends, pair=f"{ends} $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=learned, **names, cls_token="<s>", sep_token="</s>")


def _first(texts: Iterable[str], num_characters: int) -> Iterator[str]:
    for text in texts:
        if num_characters <= 0:
            return
        yield text
        num_characters -= len(text)
