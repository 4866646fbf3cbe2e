"""Pages of `explore` with a model and a text: the model's tokenizer, the command, and the data of what it wrote."""

import json
from pathlib import Path
from typing import Any

from hf_efficient_attn.cli import main


def data_of(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0]
    return dict(json.loads(text))


def explore(folder: Path, text: str, *arguments: str) -> Path:
    (folder / "text.txt").write_text(text, encoding="utf-8")
    path = folder / "page.html"
    main(["explore", "--model", str(folder), "--text", str(folder / "text.txt"), "--output", str(path), *arguments])
    return path


def save_pieces(folder: Path) -> None:
    """Save a byte-level tokenizer of 61 tokens that begins and ends texts with special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = [*"abcdefghijklmnopqrstuvwxyz<>/=.'&", "Ġ", "Ċ", "Ã", "©"]
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, **{letter: index + 3 for index, letter in enumerate(letters)}}
    raw = Tokenizer(models.BPE(words, [], unk_token="[PAD]"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
