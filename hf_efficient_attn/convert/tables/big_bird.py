"""BigBird: BERT's layout; blocks around the query, first and last block, and random blocks.

By default the function of the paper and its authors: their plan of random blocks, the same in training and evaluation,
at every length. With `parity` that of transformers, which evaluates with copies of block 0 in the place of random
blocks, reads inputs of at most (5 + 2r) blocks by full attention, and keeps answers out of the question; what differs
even then is in `compare.EXCEPTIONS`. Neither drops attention weights in block-sparse attention.

As a causal language model it is dense in transformers, and here.
"""

from typing import Any

from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.tables import bert_layout as bert
from hf_efficient_attn.convert.tables.bigbird_blocks import bigbird_deviations, bigbird_fields, bigbird_numbers
from hf_efficient_attn.errors import ConfigurationError


def to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return what no field of theirs says by itself.

    Raises:
        ConfigurationError: a language model that is not causal, or has cross-attention.
    """
    is_causal = head == "CausalLM"
    if config.is_decoder != is_causal or config.add_cross_attention:
        raise ConfigurationError(
            f"The big_bird config says is_decoder={config.is_decoder} and add_cross_attention="
            f"{config.add_cross_attention}, and the head is {head}. Causal language models need is_decoder=True, all "
            "other heads False; cross-attention cannot be converted."
        )
    activation = config.hidden_act if head == "SequenceClassification" else "tanh"
    return {
        **({} if is_causal else bigbird_fields(config, parity)),
        "is_causal": is_causal,
        "attention_bias": config.use_bias,
        "attention_output_bias": True,
        "scale_embedding": config.rescale_embeddings,
        "question_answering_head": "residual_mlp",
        "question_answering_excludes_question": parity,
        "max_position_embeddings": config.max_position_embeddings,
        **bert.classifier_fields(config, activation, head != "MultipleChoice"),
    }


def to_theirs(config: Any) -> dict[str, Any]:
    """Return their blocks."""
    return {
        **({"attention_type": "original_full"} if config.is_causal else bigbird_numbers(config, "big_bird")),
        "is_decoder": config.is_causal,
        "use_bias": config.attention_bias,
        "rescale_embeddings": config.scale_embedding,
        "classifier_dropout": config.classifier_dropout,
        "max_position_embeddings": config.max_position_embeddings,
    }


BIG_BIRD = Counterpart(
    model_type="big_bird",
    family="sparse_transformer",
    prefix="bert.",
    names=bert.NAMES,
    heads={
        "Model": {},
        "MaskedLM": bert.BERT_LM_HEAD,
        "CausalLM": bert.BERT_CAUSAL_LM_HEAD,
        "SequenceClassification": bert.ROBERTA_CLASSIFIER,
        "TokenClassification": bert.CLASSIFIER,
        "QuestionAnswering": {
            "qa_classifier.intermediate.dense": "residual_mlp.up_proj",
            "qa_classifier.output.dense": "residual_mlp.down_proj",
            "qa_classifier.output.LayerNorm": "residual_mlp.norm",
            "qa_classifier.qa_outputs": "qa_outputs",
        },
        "MultipleChoice": {"bert.pooler": "classifier.dense", **bert.LABELS},
    },
    fields=bert.FIELDS,
    to_ours=to_ours,
    to_theirs=to_theirs,
    left_behind=("pooler", "cls.seq_relationship"),
    unused=bert.BERT_UNUSED,
    deviations={
        **bert.DEVIATIONS,
        "attention_dropout": "big_bird drops no attention weights in block-sparse attention",
        **bigbird_deviations("big_bird"),
        "question_answering_excludes_question": "big_bird keeps answers out of the question",
        "classifier_activation": "big_bird has the activation of the MLP in sequence classification, tanh elsewhere",
        "max_global_tokens": "big_bird has global blocks alone",
    },
    two_labels=("QuestionAnswering",),
    ignored_fields=(
        "add_cross_attention",
        "attention_type",
        "block_size",
        "classifier_dropout",
        "is_decoder",
        "max_position_embeddings",
        "num_random_blocks",
        "rescale_embeddings",
        "use_bias",
    ),
)
