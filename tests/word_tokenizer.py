"""A tokenizer of words "w0", "w1", ... for the tiny models of `models_cases` and `attention_models`."""

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", "mask_token": "[MASK]"}


def word_tokenizer(vocab_size: int, writes_end: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose texts are words separated by spaces; padding is 0, begin 1, end 2.

    `writes_end`: whether the end is written behind every text, as encoder-decoders need it.
    """
    words = [*SPECIAL.values(), "[UNK]", *(f"w{index}" for index in range(vocab_size - 5))]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if writes_end:
        end = SPECIAL["eos_token"]
        raw.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, words.index(end))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=raw, **SPECIAL)
