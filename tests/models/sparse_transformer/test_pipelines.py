"""Pipelines of transformers work from the folder of a saved model and its tokenizer."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from models_cases import TINY
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import hf_efficient_attn as hea

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *(f"w{i}" for i in range(TINY["vocab_size"] - 5))]


def save_tokenizer(folder: Path) -> None:
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, **special, unk_token="[UNK]", model_input_names=names
    ).save_pretrained(folder)


@pytest.mark.parametrize(
    ("task", "head", "inputs"),
    [
        ("fill-mask", "ForMaskedLM", "w1 w2 [MASK] w3"),
        ("text-classification", "ForSequenceClassification", ["w1 w2", "w3 " * 40]),
        ("token-classification", "ForTokenClassification", ["w1 w2", "w3 " * 40]),
        ("feature-extraction", "Model", ["w1 w2", "w3 " * 40]),
        ("text-generation", "ForCausalLM", ["w1 w2", "w3 w4 w5"]),
    ],
)
def test_pipeline(task: str, head: str, inputs: Any, tmp_path: Path) -> None:
    is_causal = head == "ForCausalLM"
    config = hea.SparseTransformerConfig.longformer(
        **{**TINY, "attention_window": 8, "is_causal": is_causal, "pad_token_id": 0, "sep_token_id": 2}
    )
    getattr(hea, f"SparseTransformer{head}")(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    options = {"batch_size": 2} if isinstance(inputs, list) else {}
    pipe = transformers.pipeline(task, model=str(tmp_path), device="cpu", **options)
    results = pipe(inputs, **({"max_new_tokens": 3} if is_causal else {}))
    assert len(results) == (5 if task == "fill-mask" else 2)
