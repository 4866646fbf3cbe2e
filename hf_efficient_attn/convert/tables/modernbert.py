"""ModernBERT: pre-norm, gated MLPs, rotary positions; full layers become sparse, sliding ones stay.

It fuses queries, keys and values, and the MLP's gate and input. Its activations and output are dropped here as hidden
states are: between blocks.
"""

from typing import Any

from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns.bands import Band

SELF_ATTENTION = "layers.*.self_attn"
TRANSFORM = {"head.dense": "transform.dense", "head.norm": "transform.norm"}
CLASSIFIER = {**TRANSFORM, "classifier": "classifier"}
POOLING = {"cls": "first", "mean": "mean"}


def to_ours(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return what no field of theirs says by itself.

    Raises:
        ConfigurationError: scaled rotary positions.
    """
    kinds = {name: dict(rope) for name, rope in config.rope_parameters.items() if isinstance(rope, dict)}
    scaled = {name: rope for name, rope in kinds.items() if rope.get("rope_type", "default") != "default"}
    if scaled:
        raise ConfigurationError(f"rope_parameters={scaled}: rotary positions of rope_type 'default' can be converted.")
    side = config.local_attention // 2
    is_sliding = [kind == "sliding_attention" for kind in config.layer_types]
    return {
        "attention_pattern": [Band(side, side) if sliding else None for sliding in is_sliding],
        "position_embedding_type": "rope",
        "rope_theta_per_layer": [float(kinds[kind]["rope_theta"]) for kind in config.layer_types],
        "max_position_embeddings": config.max_position_embeddings,
        "norm_position": "pre",
        "norm_before_first_layer": False,
        "gated_mlp": True,
        "classifier_head": "transform",
        "question_answering_head": "transform",
        "classifier_pooling": POOLING[config.classifier_pooling],
    }


MODERNBERT = Counterpart(
    model_type="modernbert",
    family="sparse_transformer",
    prefix="model.",
    names={
        "embeddings.tok_embeddings": "embed_tokens",
        "embeddings.norm": "embeddings.norm",
        "layers.*.attn_norm": "layers.*.attention_norm",
        "layers.*.attn.Wqkv": tuple(f"{SELF_ATTENTION}.{name}_proj" for name in "qkv"),
        "layers.*.attn.Wo": f"{SELF_ATTENTION}.o_proj",
        "layers.*.mlp_norm": "layers.*.mlp_norm",
        "layers.*.mlp.Wi": ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"),
        "layers.*.mlp.Wo": "layers.*.mlp.down_proj",
        "final_norm": "norm",
    },
    heads={
        "Model": {},
        "MaskedLM": {**TRANSFORM, "decoder": "lm_head"},
        "SequenceClassification": CLASSIFIER,
        "TokenClassification": CLASSIFIER,
        "QuestionAnswering": {**TRANSFORM, "classifier": "qa_outputs"},
        "MultipleChoice": CLASSIFIER,
    },
    fields={
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "hidden_activation": "hidden_act",
        "initializer_range": "initializer_range",
        "norm_eps": "norm_eps",
        "norm_bias": "norm_bias",
        "attention_bias": ("attention_bias", "attention_output_bias"),
        "mlp_bias": "mlp_bias",
        "embedding_dropout": "embedding_dropout",
        "attention_dropout": "attention_dropout",
        "mlp_dropout": "hidden_dropout",
        "decoder_bias": "lm_head_bias",
        "classifier_activation": "lm_transform_activation",
        "classifier_bias": "lm_transform_bias",
        "classifier_dropout": "classifier_dropout",
    },
    to_ours=to_ours,
    ignored_fields=(
        "classifier_pooling",
        "cls_token_id",
        "deterministic_flash_attn",
        "initializer_cutoff_factor",
        "layer_types",
        "local_attention",
        "max_position_embeddings",
        "rope_parameters",
        "sparse_pred_ignore_index",
        "sparse_prediction",
    ),
    is_dense=True,
)
