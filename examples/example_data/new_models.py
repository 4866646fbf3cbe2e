"""Small models with random weights and their tokenizers, which an example trains if no checkpoint is named."""

from collections.abc import Iterable
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import hf_efficient_attn as hea
from example_data.tokenizers import new_tokenizer
from hf_efficient_attn.patterns import Band

ModelAndTokenizer = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def new_clm(
    model_type: str, overrides: str | None, tokenizer_name: str | None, texts: Iterable[str], size: int
) -> ModelAndTokenizer:
    """Return a small causal language model of any type that transformers knows, and its tokenizer.

    Args:
        overrides: fields of its config as text, "hidden_size=96,num_hidden_layers=4".
        tokenizer_name: folder of a tokenizer, or its name on the Hub; None: one is trained on the texts.
        size: length of the longest sequence in tokens.
    """
    tokenizer = _tokenizer(tokenizer_name, texts, vocab_size=4096, ends="$A")
    fields = {"is_causal": True, "num_hidden_layers": 6, "max_position_embeddings": size}
    if model_type == "simplified_transformer":
        fields["position_embedding_type"] = "rope"
    return AutoModelForCausalLM.from_config(_config(model_type, overrides, tokenizer, fields)), tokenizer


def new_mlm(
    model_type: str, overrides: str | None, tokenizer_name: str | None, texts: Iterable[str], size: int
) -> ModelAndTokenizer:
    """Return a small masked language model, with the arguments of `new_clm`, and its tokenizer."""
    tokenizer = _tokenizer(tokenizer_name, texts, vocab_size=8192)
    fields = {"is_causal": False, "num_hidden_layers": 4, "max_position_embeddings": size}
    return AutoModelForMaskedLM.from_config(_config(model_type, overrides, tokenizer, fields)), tokenizer


def _tokenizer(name: str | None, texts: Iterable[str], **options: Any) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(name) if name else new_tokenizer(texts, **options)


def _config(
    model_type: str, overrides: str | None, tokenizer: PreTrainedTokenizerBase, fields: dict[str, Any]
) -> PreTrainedConfig:
    shape = {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 6, "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model(model_type, **shape, **fields)
    if overrides:
        config.update_from_string(overrides)
    return config


def new_question_answering(contexts: Iterable[str], num_tokens: int) -> ModelAndTokenizer:
    """Return a sparse encoder in which the tokens of the question are global, and its tokenizer.

    Such a short training does not teach a model to compare words, so token type 1 marks the words of the question.
    """
    tokenizer = new_tokenizer(contexts, vocab_size=4096)
    config = hea.SparseTransformerConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        attention_pattern=Band(left=32, right=32),
        global_tokens="question",
        norm_position="pre",
        position_embedding_type="rope",
        max_position_embeddings=num_tokens,
        initializer_range=0.1,
        type_vocab_size=2,
        task_specific_params={"marks_words_of_question": True},
        pad_token_id=tokenizer.pad_token_id,
        sep_token_id=tokenizer.sep_token_id,
    )
    return AutoModelForQuestionAnswering.from_config(config), tokenizer


def new_seq2seq(task: str, rows: Dataset, source_column: str, target_column: str) -> ModelAndTokenizer:
    """Return a small model like LED for "summarization", or a small Transformer of 2017 for "translation"."""
    if task == "summarization":
        tokenizer = new_tokenizer(rows[source_column], vocab_size=6000, ends="$A </s>")
    else:
        texts = (row[column] for row in rows for column in (source_column, target_column))
        tokenizer = new_tokenizer(texts, vocab_size=3000, ends="$A </s>")
    fields = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "decoder_layers": 2}
    fields |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    fields |= {"vocab_size": len(tokenizer), "decoder_start_token_id": tokenizer.bos_token_id}
    if task == "translation":
        model = AutoModelForSeq2SeqLM.from_config(hea.SparseSeq2SeqConfig.vanilla(**fields, encoder_layers=2))
        model.generation_config.num_beams = 4
        return model, tokenizer
    config = hea.SparseSeq2SeqConfig.led(
        **fields,
        encoder_layers=1,
        attention_window=4,
        position_embedding_type="sinusoidal",
        norm_position="pre",
        matrix_init="glorot",
        scale_embedding=True,
        embedding_init_std=128**-0.5,
        hidden_dropout=0.1,
        embedding_dropout=0.0,
    )
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.generation_config.update(num_beams=4, no_repeat_ngram_size=3)
    # a summary repeats words of its text: let cross-attention copy the words it attends to from the first step on
    for layer in model.get_decoder().layers:
        torch.nn.init.orthogonal_(layer.cross_attn.v_proj.weight)
        layer.cross_attn.o_proj.weight.data.copy_(layer.cross_attn.v_proj.weight.T)
    return model, tokenizer
