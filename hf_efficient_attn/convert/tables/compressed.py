"""BERT, RoBERTa and XLM-RoBERTa as start values of a compressed Transformer, as Nyströmformer's authors began theirs.

All but attention is the same there. What a mechanism has besides maps of queries, keys, values and output gets start
values; by these, layers of "pattern" without one, of talking and of collaborative heads compute what the source does,
and others something else, until they are trained further. Linear attention gets random features, whose products are
those of softmax in the mean. Sources: Xiong et al., "Nyströmformer" (arXiv:2102.03902), section 4.1; for k, Wang et
al., "Linformer" (arXiv:2006.04768), section 5.1.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hf_efficient_attn.convert.configs import ConversionRequest
from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.tables import bert, roberta
from hf_efficient_attn.convert.tables.bert import BERT
from hf_efficient_attn.convert.tables.roberta import ROBERTA, XLM_ROBERTA
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns.windows import band_of_window

DEFAULT = "nystrom"
# those that start as the attention of the source
EXACT = ("pattern", "talking_heads", "collaborative_heads")
# but for reused weights, whose layers have no queries and keys
MECHANISMS = (DEFAULT, "linformer", "linear", "memory_compressed", "prior", "residual_scores", *EXACT)
# up to how many tokens Linformer's authors project to 128, and longer texts to 256
SHORT_TOKENS = 512
STARTED = (
    "length_maps.key_map",
    "length_maps.value_map",
    "features.vectors",
    "conv",
    "key_conv",
    "value_conv",
    "prior_weight",
    "prior_bias",
    "score_map",
    "weight_map",
    "mixing",
)


def asked(config: Any, request: ConversionRequest) -> dict[str, Any]:
    """Return the mechanisms that a caller asks for, and the pattern or window of those that follow one.

    Raises:
        ConfigurationError: `parity` of mechanisms that compute something else, or global projections.
    """
    mechanism = DEFAULT if request.mechanism is None else request.mechanism
    listed = set(mechanism) if isinstance(mechanism, list) else {mechanism}
    if request.parity and not listed <= set(EXACT):
        raise ConfigurationError(
            f"parity=True: layers of {', '.join(sorted(listed - set(EXACT)))} cannot compute what their source does. "
            f"Those of {', '.join(EXACT)} can. Leave parity (--parity) out."
        )
    if request.global_projections is not None:
        raise ConfigurationError(
            f"global_projections={request.global_projections}: a compressed_transformer has no global tokens. Leave "
            "global_projections out."
        )
    fields: dict[str, Any] = {"mechanism": mechanism, "attention_pattern": request.pattern}
    if request.attention_window is not None:
        fields["attention_pattern"] = band_of_window(request.attention_window)
    if "linear" in listed:
        fields["feature_map"] = "positive_random"
    if "linformer" in listed:
        longest = request.max_position_embeddings or config.max_position_embeddings
        fields["projected_tokens"] = min(longest, 128 if longest <= SHORT_TOKENS else 256)
    return fields


def warning(config: Any) -> str:
    """Return what the user of such a model should know; empty: it computes what its source does."""
    others = {config.mechanism_of_layer(layer) for layer in range(config.num_hidden_layers)} - set(EXACT)
    if not others:
        return ""
    return (
        f"Layers of {', '.join(sorted(others))} have the weights of their source as start values, and compute "
        "something else. Train the model further, on masked tokens, before it is fine-tuned."
    )


def _lift(source: Counterpart, to_ours: Callable[[Any, str, bool], dict[str, Any]]) -> Counterpart:
    """Return the table by which models of a type become compressed Transformers."""
    return replace(
        source,
        family="compressed_transformer",
        # what the source does
        to_ours=lambda config, head, parity: {**to_ours(config, head, parity), "mechanism": "pattern"},
        asked=asked,
        mechanisms=MECHANISMS,
        started=tuple(f"layers.*.self_attn.{name}" for name in STARTED),
        warning=warning,
        is_dense=False,
    )


BERT_AS_COMPRESSED = _lift(BERT, bert.to_ours)
ROBERTA_AS_COMPRESSED = _lift(ROBERTA, roberta.to_ours)
XLM_ROBERTA_AS_COMPRESSED = _lift(XLM_ROBERTA, roberta.to_ours)
