"""Tiny models of transformers with random weights, and what they must compute, as matrices."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as tr
from torch import Tensor

from hf_efficient_attn.patterns import Band, GlobalTokens, Pattern

VOCABULARY = 61
WIDE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = {**WIDE, "vocab_size": VOCABULARY, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**TINY, "num_key_value_heads": 2, "pad_token_id": 0}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
BART = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in
        (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
SEQ2SEQ = {"vocab_size": VOCABULARY, "d_model": 32, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
MODERN = {**TINY, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 6}

CONFIGS: dict[str, Callable[[], tr.PreTrainedConfig]] = {
    "llama": lambda: tr.LlamaConfig(**DECODER),
    "qwen3": lambda: tr.Qwen3Config(**DECODER, head_dim=8),
    "gemma3": lambda: tr.Gemma3TextConfig(**DECODER, **SLIDING),
    "mistral": lambda: tr.MistralConfig(**DECODER, sliding_window=None),
    "mistral_sliding": lambda: tr.MistralConfig(**DECODER, sliding_window=5),
    "gpt2": lambda: tr.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2
    ),
    "opt": lambda: tr.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "bert": lambda: tr.BertConfig(**TINY),
    "roberta": lambda: tr.RobertaConfig(**TINY),
    "modernbert": lambda: tr.ModernBertConfig(**MODERN, layer_types=["sliding_attention", "full_attention"]),
    "bart": lambda: tr.BartConfig(**SEQ2SEQ, **BART, bos_token_id=1, forced_eos_token_id=None),
    "t5": lambda: tr.T5Config(**SEQ2SEQ, num_layers=2, num_decoder_layers=2, num_heads=4, d_kv=8, d_ff=64),
    "vit": lambda: tr.ViTConfig(**WIDE, image_size=16, patch_size=4),
}
CAUSAL = ("llama", "qwen3", "gemma3", "mistral", "mistral_sliding", "gpt2", "opt")
ENCODERS = ("bert", "roberta", "modernbert")
SEQ2SEQS = ("bart", "t5")
# every layer of mistral_sliding is sliding: none could follow a pattern; opt counts its mask, and takes no matrix
SPARSE = tuple(name for name in CONFIGS if name not in ("mistral_sliding", "opt"))
PATTERN = Band(left=3, right=2) | GlobalTokens([0, 1])


def build(name: str, **options: Any) -> Any:
    """Return a model with weights large enough for attention to matter, in evaluation mode."""
    torch.manual_seed(0)
    model = new(name, **options) if options else copy.deepcopy(built_once(name))
    # what a test draws does not depend on whether the model was built before
    torch.manual_seed(0)
    return model


@cache
def built_once(name: str) -> Any:
    """Return the model, of which everybody gets a copy, in less time."""
    return new(name)


def new(name: str, **options: Any) -> Any:
    if name in CAUSAL:
        auto: Any = tr.AutoModelForCausalLM
    elif name in ENCODERS:
        auto = tr.AutoModelForMaskedLM
    else:
        auto = tr.AutoModelForSeq2SeqLM if name in SEQ2SEQS else tr.AutoModelForImageClassification
    model = auto.from_config(CONFIGS[name](), **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model


def token_ids(rows: int, tokens: int, seed: int = 2) -> Tensor:
    """Return random token ids, none of them special."""
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def padding(ids: Tensor, side: str) -> Tensor:
    """Return a mask that pads four tokens of the first row and one of the second; side "none": all ones."""
    mask = torch.ones_like(ids)
    for row, count in enumerate((4, 1)):
        if side == "left":
            mask[row, :count] = 0
        if side == "right":
            mask[row, -count:] = 0
    return mask


def inputs_of(name: str, side: str, tokens: int = 14) -> dict[str, Tensor]:
    """Return inputs of two examples; the second of an encoder-decoder's texts is shorter."""
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))}
    ids = token_ids(2, tokens)
    inputs = {"input_ids": ids, "attention_mask": padding(ids, side)}
    if name in SEQ2SEQS:
        inputs["decoder_input_ids"] = token_ids(2, 6, seed=3)
    return inputs


def outputs_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the logits of all tokens that are not padding, [tokens, vocabulary]."""
    with torch.no_grad():
        logits = model(**inputs).logits
    mask = inputs.get("attention_mask")
    if mask is None or "decoder_input_ids" in inputs or not isinstance(mask, Tensor) or mask.dim() != 2:
        return logits
    return logits[mask.bool()]


def matrix(pattern: Pattern, mask: Tensor) -> Tensor:
    """Return who may read whom, bool [batch, 1, tokens, tokens]: the pattern from each row's first token on."""
    start = mask.argmax(1)[:, None]
    positions = torch.arange(mask.shape[1])[None] - start
    allowed = pattern.allowed(positions[:, :, None], positions[:, None, :])
    # a padding token reads itself: a row without keys is NaN in sdpa
    own = torch.eye(mask.shape[1], dtype=torch.bool)
    return ((allowed & mask.bool()[:, None, :]) | (own & ~mask.bool()[:, None]))[:, None]
