"""BERT, RoBERTa and XLM-RoBERTa as start values of an ETC, as its authors began their large model.

Both inputs begin with the same maps, norms and MLPs. Labels of distances take the place of absolute positions, so that
what comes out computes something else until it is trained further. Source: Ainslie et al. (arXiv:2004.08483), section
4; the authors do not say what became of token types, which are kept here.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hf_efficient_attn.convert.configs import ConversionRequest
from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.tables import bert_layout as bert
from hf_efficient_attn.convert.tables import roberta
from hf_efficient_attn.convert.tables.bert import BERT, check_encoder
from hf_efficient_attn.convert.tables.roberta import ROBERTA, XLM_ROBERTA
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns.windows import band_of_window

POSITIONS = "embeddings.position_embeddings"
LABELS = ("vectors", "biases")
# the authors give 1 to sentences, which is the first token of BERT's vocabulary that no text has
UNUSED_TOKENS = (1, 0)
WARNING = (
    "The ETC has the weights of its source as start values, and computes something else: labels of distances take the "
    "place of positions. Train it further, on masked tokens, before it is fine-tuned."
)


def to_ours_of_bert(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return what no field of BERT's says by itself.

    Raises:
        ConfigurationError: `parity`, or what `check_encoder` refuses.
    """
    check_encoder(config)
    token = next(each for each in UNUSED_TOKENS if each != config.pad_token_id)
    return {**_fields(config, parity, bert.classifier_fields(config)), "global_token_id": token}


def to_ours_of_roberta(config: Any, head: str, parity: bool) -> dict[str, Any]:
    """Return what no field of RoBERTa's says by itself.

    Raises:
        ConfigurationError: `parity`, no token for the begin of a text, or what `roberta.to_ours` refuses.
    """
    own = roberta.to_ours(config, head, parity)
    # its vocabulary has no unused token; that before a text stands for all of it
    token = config.bos_token_id
    if token is None or token == config.pad_token_id:
        raise ConfigurationError(
            f"The {config.model_type} config says bos_token_id={token}, pad_token_id={config.pad_token_id}, and global "
            "tokens begin as the token before a text. Set bos_token_id, to a token that is no padding."
        )
    del own["position_offset"]
    return {**_fields(config, parity, own), "global_token_id": token}


def _fields(config: Any, parity: bool, own: dict[str, Any]) -> dict[str, Any]:
    if parity:
        raise ConfigurationError(
            f"parity=True: an etc_transformer cannot compute what a {config.model_type} does, as it has no positions. "
            "Leave parity (--parity) out."
        )
    # a chunk is part of a text, the first no more than the others
    return {**own, "classifier_pooling": "mean", "long_token_type": 0}


def asked(config: Any, request: ConversionRequest) -> dict[str, Any]:
    """Return the fields that say which band or pattern a caller asks for, and whether both inputs share their maps.

    Raises:
        ConfigurationError: an odd window.
    """
    fields: dict[str, Any] = {} if request.pattern is None else {"attention_pattern": request.pattern}
    if request.attention_window is not None:
        fields["local_radius"] = band_of_window(request.attention_window).left
    if request.global_projections is False:
        fields |= {"share_qkv_projections": True, "share_output_projection": True}
    return fields


def _names() -> dict[str, str]:
    """Return BERT's names without positions, those of its attention as those of long tokens."""
    attention = {f"layers.*.self_attn.{name}_proj": f"layers.*.self_attn.long_side.{name}_proj" for name in "qkv"}
    return {theirs: attention.get(ours, ours) for theirs, ours in bert.NAMES.items() if theirs != POSITIONS}


def _doubled() -> Mapping[str, str]:
    """Return the modules of an ETC that begin as others of it: those of global tokens, and keys of the other input."""
    own, long = "layers.*.self_attn.", "layers.*.self_attn.long_side."
    maps = {f"{own}global_side.{name}_proj": f"{long}{name}_proj" for name in "qkv"}
    other = {
        f"{own}{side}_side.other_{name}_proj": f"{long}{name}_proj" for side in ("long", "global") for name in "kv"
    }
    return {
        **maps,
        **other,
        f"{own}global_o_proj": f"{own}o_proj",
        "layers.*.global_attention_norm": "layers.*.attention_norm",
        "embeddings.global_norm": "embeddings.norm",
    }


def _lift(source: Counterpart, to_ours: Callable[[Any, str, bool], dict[str, Any]]) -> Counterpart:
    """Return the table by which models of a type become ETCs."""
    return replace(
        source,
        family="etc_transformer",
        names=_names(),
        to_ours=to_ours,
        asked=asked,
        left_behind=(*source.left_behind, POSITIONS),
        doubled=_doubled(),
        started=tuple(f"layers.*.self_attn.{which}_labels.{kind}" for which in ("long", "global") for kind in LABELS),
        warning=lambda config: WARNING,
    )


BERT_AS_ETC = _lift(BERT, to_ours_of_bert)
ROBERTA_AS_ETC = _lift(ROBERTA, to_ours_of_roberta)
XLM_ROBERTA_AS_ETC = _lift(XLM_ROBERTA, to_ours_of_roberta)
