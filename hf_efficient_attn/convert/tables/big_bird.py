"""Tables of BigBird and BigBird-Pegasus.

BigBird: BERT's layout; blocks around the query, first and last block, and random blocks.

By default the model follows the paper and its authors' code: their plan of random blocks, the same in training and
evaluation, at every length. With `parity` it follows transformers, which uses copies of block 0 in place of the random
blocks in eval mode, full attention for inputs of at most 5 + 2r blocks (r random blocks), and no answers inside the
question; `compare.EXCEPTIONS` lists what still differs. Neither applies dropout to the weights of block-sparse
attention.

As a causal language model, BigBird is dense in transformers and here.

BigBird-Pegasus: Pegasus' pre-norm layout, BigBird's blocks in the encoder; `parity` does the same as for BigBird.
"""

from typing import Any

from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.tables import bart, bert
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.integration.layer_patterns import ENCODER, config_patterns
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.big_bird import PREFIX_LENGTHS, bigbird


def bigbird_fields(config: Any, parity: bool) -> dict[str, Any]:
    """Return our fields for the attention of the paper, or with `parity` that of transformers."""
    if config.attention_type == "original_full":
        return {}
    block, count = config.block_size, config.num_random_blocks
    exact = {"random_blocks_in_eval": "transformers", "full_attention_up_to": (5 + 2 * count) * block}
    return {
        "attention_pattern": bigbird(block, count, seed=0, plan="transformers" if parity else "authors"),
        "attention_dropout": 0.0,
        **(exact if parity else {}),
    }


def bigbird_numbers(config: Any, model_type: str) -> dict[str, Any]:
    """Return the fields of their config for our pattern.

    Raises:
        ConfigurationError: the layers do not all have BigBird's pattern with the seed of the published code.
    """
    if config.attention_pattern is None:
        return {"attention_type": "original_full"}
    patterns = config_patterns(config.attention_pattern, config, ENCODER) or (None,)
    for pattern in set(patterns) if len(set(patterns)) == 1 else ():
        sizes = [member.to_dict() for member in pattern.members()] if pattern is not None else []
        drawn = next((size for size in sizes if size["kind"] == "bigbird_blocks"), None)
        if drawn is not None:
            block, count = drawn["block_tokens"], drawn["num_blocks"]
            if pattern in [bigbird(block, count, 0, plan) for plan in PREFIX_LENGTHS]:
                return {"attention_type": "block_sparse", "block_size": block, "num_random_blocks": count}
    raise ConfigurationError(
        f"{model_type} has only the pattern patterns.bigbird(block_tokens, num_random_blocks, seed=0, plan='authors' "
        f"or 'transformers'), the same in all layers, but the config has {shown(config.attention_pattern)}."
    )


def bigbird_deviations(model_type: str) -> dict[str, str]:
    """Return the fields of our config in which a model type of transformers differs, and how."""
    return {
        "attention_pattern": f"{model_type} draws other random blocks at 2,048 tokens",
        "random_blocks_in_eval": f"in eval mode {model_type} has copies of block 0 instead of random blocks",
        "full_attention_up_to": f"{model_type} computes full attention on short inputs",
    }


def big_bird_to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return the fields of our config that are not simply copied from theirs.

    Raises:
        ConfigurationError: a language model that is not causal, or has cross-attention.
    """
    is_causal = head == "CausalLM"
    if config.is_decoder != is_causal or config.add_cross_attention:
        raise ConfigurationError(
            f"The big_bird config has is_decoder={config.is_decoder} and add_cross_attention="
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


def big_bird_to_theirs(config: Any) -> dict[str, Any]:
    """Return the fields of their config that are not simply copied from ours."""
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
    to_ours=big_bird_to_ours,
    to_theirs=big_bird_to_theirs,
    left_behind=("pooler", "cls.seq_relationship"),
    unused=bert.BERT_UNUSED,
    deviations={
        **bert.DEVIATIONS,
        "attention_dropout": "big_bird has no dropout in block-sparse attention",
        **bigbird_deviations("big_bird"),
        "question_answering_excludes_question": "big_bird never takes answers from the question",
        "classifier_activation": "big_bird has the activation of the MLP in sequence classification, tanh elsewhere",
        "max_global_tokens": "big_bird has only global blocks",
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


def bigbird_pegasus_to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return the fields of our config that are not simply copied from theirs.

    Raises:
        ConfigurationError: encoder and decoder of different shapes.
    """
    return {
        **bigbird_fields(config, parity),
        # not 0.0, because the decoder uses it
        "attention_dropout": config.attention_dropout,
        "attention_bias": config.use_bias,
        "attention_output_bias": config.use_bias,
        "norm_position": "pre",
        "embedding_norm": False,
        "scale_embedding": config.scale_embedding,
        **bart.common_fields(config, config.max_position_embeddings, config.max_position_embeddings),
    }


def bigbird_pegasus_to_theirs(config: Any) -> dict[str, Any]:
    """Return the fields of their config that are not simply copied from ours; both sides have one length."""
    return {
        **bart.decoder_sizes(config),
        **bigbird_numbers(config, "bigbird_pegasus"),
        "use_bias": config.attention_bias,
        "scale_embedding": config.scale_embedding,
        "max_position_embeddings": config.max_position_embeddings,
    }


BIGBIRD_PEGASUS = Counterpart(
    model_type="bigbird_pegasus",
    family="sparse_seq2seq",
    prefix="model.",
    names={
        **bart.AROUND,
        **bart.LEARNED_POSITIONS,
        "encoder.layernorm_embedding": "encoder.norm",
        "decoder.layernorm_embedding": "decoder.norm",
        **bart.projections(f"{bart.SELF_ATTENTION}.self", bart.SELF_ATTENTION),
        f"{bart.SELF_ATTENTION}.output": f"{bart.SELF_ATTENTION}.o_proj",
    },
    heads=bart.HEADS,
    fields=bart.FIELDS,
    to_ours=bigbird_pegasus_to_ours,
    to_theirs=bigbird_pegasus_to_theirs,
    copies=bart.COPIES,
    deviations={**bart.DEVIATIONS, **bigbird_deviations("bigbird_pegasus")},
    two_labels=("QuestionAnswering",),
    ignored_fields=(
        *bart.IGNORED_FIELDS,
        "attention_type",
        "block_size",
        "max_position_embeddings",
        "num_random_blocks",
        "use_bias",
    ),
)
