"""A dataset with a column `global_attention_mask`: transformers' collators stop at it, the model card's does not."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

CARD = Path(__file__).parents[3] / "model_cards" / "sparse_transformer.md"
ROWS = [{"input_ids": [4] * tokens, "global_attention_mask": [1] + [0] * (tokens - 1)} for tokens in (2, 4)]


def tokenizer(padding_side: str) -> Any:
    raw = Tokenizer(models.WordLevel({"[PAD]": 0, "[MASK]": 1, "[UNK]": 2, "w": 4}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "mask_token": "[MASK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, padding_side=padding_side, **special)


@pytest.mark.parametrize("name", ["DataCollatorWithPadding", "DataCollatorForLanguageModeling"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_collator_of_the_card(name: str, side: str) -> None:
    stock = getattr(transformers, name)(tokenizer(side))
    with pytest.raises(ValueError, match="Unable to create tensor"):
        stock(ROWS)
    (snippet,) = re.findall(r"```python\n(def collate.*?)```", CARD.read_text(), flags=re.DOTALL)
    scope = {"torch": torch, "collator": stock, "tokenizer": stock.tokenizer}
    exec(snippet, scope)
    batch = scope["collate"](ROWS)
    first = (batch["attention_mask"].cumsum(1) == 1) & batch["attention_mask"].bool()
    assert torch.equal(batch["global_attention_mask"], first.long())
