"""Tiny models of transformers, every parameter random, and inputs for them."""

import copy
from functools import cache
from typing import Any

import torch
import transformers
from models_cases import randomize

HEADS = (
    "AutoModel",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForMultipleChoice",
)
SEQ2SEQ_HEADS = (
    "AutoModel",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSequenceClassification",
    "AutoModelForQuestionAnswering",
)
ENCODER = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
    "sep_token_id": 2,
    "num_labels": 2,
}
SIDES = {
    "vocab_size": 61,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_labels": 2,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
BIGBIRD = {"block_size": 4, "num_random_blocks": 1}
MODERN = {"num_hidden_layers": 3, "bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 2, "local_attention": 8}
FIELDS: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "roberta": ENCODER,
    "xlm-roberta": ENCODER,
    "modernbert": {**ENCODER, **MODERN},
    # as many landmarks as tokens of a segment are full attention, at any length
    "nystromformer": {**ENCODER, "num_landmarks": 61, "segment_means_seq_len": 61, "conv_kernel_size": 5},
    "longformer": {**ENCODER, "attention_window": [8, 4]},
    "big_bird": {**ENCODER, **BIGBIRD},
    "bart": {**SIDES, "max_position_embeddings": 80},
    "pegasus": {**SIDES, "max_position_embeddings": 80, "scale_embedding": True},
    "marian": {**SIDES, "max_position_embeddings": 80, "scale_embedding": True},
    "led": {
        **SIDES,
        "attention_window": [8, 4],
        "max_encoder_position_embeddings": 80,
        "max_decoder_position_embeddings": 72,
    },
    "bigbird_pegasus": {**SIDES, **BIGBIRD, "max_position_embeddings": 80},
    "reformer": {
        "vocab_size": 61,
        "hidden_size": 32,
        "feed_forward_size": 48,
        "attn_layers": ["local", "lsh"],
        "num_attention_heads": 4,
        "attention_head_size": 8,
        "max_position_embeddings": 80,
        "axial_pos_shape": [8, 10],
        "axial_pos_embds_dim": [8, 24],
        # longer texts would be hashed by other rotations at every call
        "lsh_attn_chunk_length": 80,
        "local_attn_chunk_length": 80,
        "num_labels": 2,
        "pad_token_id": 1,
    },
}
LACKS = {
    ("led", "AutoModelForSequenceClassification"),
    *(("reformer", f"AutoModelFor{head}") for head in ("TokenClassification", "MultipleChoice")),
    *(
        (name, f"AutoModelFor{head}")
        for name in ("pegasus", "marian")
        for head in ("SequenceClassification", "QuestionAnswering")
    ),
}


def heads_of(*model_types: str) -> list[tuple[str, str]]:
    """Return every model type with every head that it has."""
    pairs = [(name, head) for name in model_types for head in (SEQ2SEQ_HEADS if "d_model" in FIELDS[name] else HEADS)]
    return [pair for pair in pairs if pair not in LACKS]


def in_tree(model_type: str, head: str = "AutoModel", **changes: Any) -> Any:
    """Return a model of transformers in eval mode, biases of the vocabulary included random."""
    return new(model_type, head, **changes) if changes else copy.deepcopy(built_once(model_type, head))


@cache
def built_once(model_type: str, head: str) -> Any:
    """Return the model, of which everybody gets a copy, in less time."""
    return new(model_type, head)


def new(model_type: str, head: str, **changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **{**FIELDS[model_type], **changes})
    torch.manual_seed(0)
    model = getattr(transformers, head).from_config(config, attn_implementation="eager")
    sinusoids = {name: tensor.clone() for name, tensor in model.state_dict().items() if "embed_positions" in name}
    randomize(model.eval())
    if model_type in ("pegasus", "marian"):
        model.load_state_dict(sinusoids, strict=False)
    if getattr(model, "final_logits_bias", None) is not None:
        model.final_logits_bias.normal_()
    return model


def inputs_of(model_type: str, head: str, tokens: int = 61, padded: int = 0) -> dict[str, torch.Tensor]:
    """Return a batch of three, the first example with `padded` tokens of padding at its end, where the head allows it.

    Question answering and multiple choice have the three separators that Longformer asks for.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(7, 61, (3, tokens), generator=generator)
    ids[:, [10, 11, -1]] = 2
    mask = torch.ones_like(ids)
    if padded and not head.endswith(("QuestionAnswering", "MultipleChoice")):
        mask[0, -padded:] = 0
        ids[0, -padded:] = 1
        ids[0, -padded - 1] = 2
    inputs = {"input_ids": ids, "attention_mask": mask}
    if head.endswith("MultipleChoice"):
        inputs = {name: torch.stack((tensor, tensor.flip(0)), 1) for name, tensor in inputs.items()}
    if model_type == "big_bird" and head.endswith("QuestionAnswering"):
        inputs["token_type_ids"] = (torch.arange(tokens) > 10).long().expand_as(ids)
    if "d_model" in FIELDS[model_type] and head in ("AutoModel", "AutoModelForSeq2SeqLM"):
        inputs["decoder_input_ids"] = torch.randint(7, 61, (3, 9), generator=generator)
    return inputs


def largest_difference(model: Any, other: Any, inputs: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of all output tensors, over real tokens and logits that are not masked out.

    A pooler's output, which ours do not have, is left out.
    """
    with torch.no_grad():
        outputs = [
            {name: each for name, each in one(**inputs).items() if torch.is_tensor(each) and name != "pooler_output"}
            for one in (model, other)
        ]
    assert outputs[0].keys() == outputs[1].keys()
    mask, largest = inputs["attention_mask"], 0.0
    for name, first in outputs[0].items():
        second = outputs[1][name]
        assert first.shape == second.shape, name
        counts = first.abs() < 1e5
        if first.shape[:2] == mask.shape[:2] and mask.ndim == 2:
            counts &= mask.bool().view(*mask.shape, *[1] * (first.ndim - 2))
        largest = max(largest, float((first - second)[counts].abs().max()))
    return largest
