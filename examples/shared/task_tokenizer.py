"""A tokenizer for a corpus, where none can be downloaded: byte-level BPE, trained on the corpus itself."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from shared.tokenizer_text import first_bytes

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SPECIAL_TOKENS |= {"mask_token": "<mask>", "cls_token": "<s>", "sep_token": "</s>"}


def train_task_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int, start: str = "<s> "
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `vocab_size` tokens, trained on the first 8 MB of `texts`.

    Texts become `<s> text </s>`, pairs `<s> question </s> text </s>`.

    Args:
        max_length: longest input in tokens, which `truncation=True` cuts to.
        start: what precedes a text; "" for encoder-decoders, whose inputs only end.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = list(dict.fromkeys(SPECIAL_TOKENS.values()))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(first_bytes(texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start}$A </s>",
        pair=f"{start}$A </s> $B </s>",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **SPECIAL_TOKENS,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Return the fields of a config that name special tokens."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id")
    return {name: getattr(tokenizer, name) for name in names}
