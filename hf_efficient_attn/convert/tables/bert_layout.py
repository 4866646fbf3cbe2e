"""Names that BERT and all that followed it share: RoBERTa, Longformer, BigBird."""

from typing import Any

from hf_efficient_attn.errors import ConfigurationError

ATTENTION = {
    "encoder.layer.*.attention.self.query": "layers.*.self_attn.q_proj",
    "encoder.layer.*.attention.self.key": "layers.*.self_attn.k_proj",
    "encoder.layer.*.attention.self.value": "layers.*.self_attn.v_proj",
    "encoder.layer.*.attention.output.dense": "layers.*.self_attn.o_proj",
    "encoder.layer.*.attention.output.LayerNorm": "layers.*.attention_norm",
}
GLOBAL_ATTENTION = {
    "encoder.layer.*.attention.self.query_global": "layers.*.self_attn.global_attention.q_proj",
    "encoder.layer.*.attention.self.key_global": "layers.*.self_attn.global_attention.k_proj",
    "encoder.layer.*.attention.self.value_global": "layers.*.self_attn.global_attention.v_proj",
}
NAMES = {
    "embeddings.word_embeddings": "embed_tokens",
    "embeddings.position_embeddings": "embeddings.positions.table",
    "embeddings.token_type_embeddings": "embeddings.token_types",
    "embeddings.LayerNorm": "embeddings.norm",
    **ATTENTION,
    "encoder.layer.*.intermediate.dense": "layers.*.mlp.up_proj",
    "encoder.layer.*.output.dense": "layers.*.mlp.down_proj",
    "encoder.layer.*.output.LayerNorm": "layers.*.mlp_norm",
}

# heads: BERT's own, those of RoBERTa, and those that all have
BERT_LM_HEAD = {
    "cls.predictions.transform.dense": "transform.dense",
    "cls.predictions.transform.LayerNorm": "transform.norm",
    "cls.predictions.decoder": "lm_head",
}
BERT_CAUSAL_LM_HEAD = {
    "cls.predictions.transform.dense": "model.transform.dense",
    "cls.predictions.transform.LayerNorm": "model.transform.norm",
    "cls.predictions.decoder": "lm_head",
}
BERT_UNUSED = {"cls.predictions.bias": "cls.predictions.decoder.bias"}
ROBERTA_LM_HEAD = {
    "lm_head.dense": "transform.dense",
    "lm_head.layer_norm": "transform.norm",
    "lm_head.decoder": "lm_head",
}
# a constant of their code, whatever the activation of the MLPs
ROBERTA_LM_ACTIVATION = "gelu"
ROBERTA_UNUSED = {"lm_head.bias": "lm_head.decoder.bias"}
ROBERTA_CLASSIFIER = {"classifier.dense": "classifier.dense", "classifier.out_proj": "classifier.out_proj"}
# behind a map that is called otherwise
LABELS = {"classifier": "classifier.out_proj"}
CLASSIFIER = {"classifier": "classifier"}
ANSWER = {"qa_outputs": "qa_outputs"}

FIELDS: dict[str, str | tuple[str, ...]] = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "hidden_act": "hidden_act",
    "hidden_dropout_prob": ("hidden_dropout", "embedding_dropout"),
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "norm_eps",
    "type_vocab_size": "type_vocab_size",
}
DROPOUT = "the source has one dropout for embeddings, hidden states and classifiers"
DEVIATIONS = {"embedding_dropout": DROPOUT, "classifier_dropout": DROPOUT}


def roberta_heads(prefix: str) -> dict[str, dict[str, str]]:
    """Return the heads that RoBERTa and Longformer have; `prefix`: of their backbone."""
    return {
        "Model": {},
        "MaskedLM": ROBERTA_LM_HEAD,
        "SequenceClassification": ROBERTA_CLASSIFIER,
        "TokenClassification": CLASSIFIER,
        "QuestionAnswering": ANSWER,
        "MultipleChoice": {f"{prefix}pooler.dense": "classifier.dense", **LABELS},
    }


def rows_before_positions(config: Any) -> int:
    """Return how many rows RoBERTa's position tables have, that no token has, before that of position 0.

    Raises:
        ConfigurationError: no padding token, by which transformers counts them.
    """
    if config.pad_token_id is None:
        raise ConfigurationError(
            f"The {config.model_type} config says pad_token_id=None, and position tables of RoBERTa's and Longformer's "
            "kind begin with pad_token_id + 1 rows. Set pad_token_id."
        )
    return int(config.pad_token_id) + 1


def classifier_fields(config: Any, activation: str = "tanh", has_own_dropout: bool = True) -> dict[str, Any]:
    """Return the fields of heads that read the first token through a dense map.

    has_own_dropout: their code reads `classifier_dropout`, and not always the dropout of hidden states.
    """
    dropout = getattr(config, "classifier_dropout", None) if has_own_dropout else None
    return {
        "classifier_head": "dense",
        "classifier_activation": activation,
        "classifier_pooling": "first",
        "classifier_dropout": config.hidden_dropout_prob if dropout is None else dropout,
    }
