"""Texts of a few words, and a BERT of 18 positions with their tokenizer."""

from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

WORDS = ("the", "list", "of", "a", "file", "path", "returns", "opens", "value")


def texts(num: int) -> list[str]:
    """Return texts of 60 words, others for each number of them."""
    random = Random(num)
    return [" ".join(random.choices(WORDS, k=60)) + "." for _ in range(num)]


def tiny_tokenizer() -> BertTokenizerFast:
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    vocab = {token: index for index, token in enumerate([*special, *WORDS, "."])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    return BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=18)


def write_tiny_bert(folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=18, **shape)
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
