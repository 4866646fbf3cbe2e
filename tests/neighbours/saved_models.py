"""One tiny model of each family, in a folder with a tokenizer, as the command lines of neighbours want it."""

from pathlib import Path
from typing import Any

from attention_models import PATTERN, build
from models_cases import CASES, TINY
from seq2seq_cases import CASES as SEQ2SEQ_CASES
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea

CAUSAL = {
    "simplified_transformer": "simplified-pre_ln",
    "sparse_transformer": "sparse-longformer-causal",
    "adaptive_span": "span-modern",
    "efficient_reformer": "reformer-causal",
    "routing_transformer": "routing-rope",
    "sparsified": "llama",
}
ENCODERS = {
    "simplified_transformer": "simplified-sas_p-masked",
    "sparse_transformer": "sparse-longformer",
    "adaptive_span": "span-encoder",
    "efficient_reformer": "reformer-masked",
    "routing_transformer": "routing-masked",
    "sparsified": "bert",
}
SEQ2SEQ = {"sparse_seq2seq": "seq2seq-led"}
ALL = {**CAUSAL, **SEQ2SEQ}


# of every family, what reads a text at once; an encoder-decoder's decoder reads the text, too, moved by a token
READERS = {**ENCODERS, **SEQ2SEQ}


def build_model(name: str, auto_class: str | None = None, **fields: Any) -> Any:
    """Return the model of a case, with these fields in its config, or a sparsified one of transformers."""
    case: Any = next((case for case in [*CASES, *SEQ2SEQ_CASES] if case.name == name), None)
    if case is None:
        return hea.sparsify(build(name), PATTERN)
    return case.model(auto_class or case.main_head, **fields)


def save_model(folder: Path, name: str, auto_class: str | None = None, **fields: Any) -> Any:
    """Write such a model and its tokenizer into a folder, and return it."""
    return save_with_tokenizer(build_model(name, auto_class, **fields), folder)


def save_with_tokenizer(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    writes_end = model.config.is_encoder_decoder
    word_tokenizer(TINY["vocab_size"], writes_end).save_pretrained(folder)
    return model
