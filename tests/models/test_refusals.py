"""Configs, checkpoints and calls that every family, or one, refuses: the type of the error and what it names."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_cases import compressed
from families import one_each
from models_cases import TINY, random_ids

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import (
    Band,
    Blocks,
    Causal,
    CompressedKeys,
    GlobalTokens,
    PerHead,
    RandomBlocks,
)

SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
SPANS = [[1.0, 5.0, 0.0, 12.0]] * 2
FROZEN = {"frozen_spans": SPANS, "span_penalty": 0.0}
LINEAR, PATTERN = {"mechanism": "linear"}, {"mechanism": "pattern"}
NAN = [[1.0] * 4, [float("nan")] * 4]
COLLABORATIVE, TREE = {"mechanism": "collaborative_heads"}, {"separate_sentences": True, "is_causal": True}
Sparse, Seq2Seq = hea.SparseTransformerConfig, hea.SparseSeq2SeqConfig


def spans(**fields: Any) -> Any:
    return hea.AdaptiveSpanConfig(**{**SHAPE, "span_limit": 40, **fields})


def tiny_compressed(**fields: Any) -> Any:
    return compressed("tiny", **fields).config()


def reformer(**fields: Any) -> Any:
    return hea.EfficientReformerConfig(**{**TINY, **fields})


def tiny_sparse(**fields: Any) -> Any:
    return Sparse(**TINY, **fields)


# fields, and the one that is named
CONFIGS: list[tuple[Callable[..., Any], list[tuple[dict[str, Any], str]]]] = [
    (
        spans,
        [
            ({"span": "learned"}, "span='learned'"),
            ({"span_init": 20.0}, "span_init"),
            ({"span_init": -0.1}, "span_init"),
            ({"is_causal": False, "include_self": False, "position_embedding_type": "rope"}, "include_self"),
            ({"is_causal": False, "include_self": True}, "relative_keys"),
            ({"position_embedding_type": "learned"}, "position_embedding_type"),
            ({"hidden_size": 36, "position_embedding_type": "rope"}, "head size"),
            ({**FROZEN, "span": "dynamic"}, "span="),
            ({"frozen_spans": SPANS}, "span_penalty=2e-06"),
            ({**FROZEN, "frozen_spans": SPANS[:1]}, "frozen_spans"),
            ({**FROZEN, "frozen_spans": [[1.0] * 4, [1.0] * 3]}, "frozen_spans"),
            ({**FROZEN, "frozen_spans": [[1.0] * 4, [40.5] * 4]}, "span_limit=40"),
            ({**FROZEN, "frozen_spans": NAN}, "span_limit=40"),
        ],
    ),
    (
        hea.SimplifiedTransformerConfig,
        [
            ({"block": "sas-p"}, "Did you mean 'sas_p'"),
            ({"mlp_gian": 0.1}, "mlp_gain"),
            ({"trainable_gains": ["beta"]}, "trainable_gains"),
            ({"block": "sas_p", "mlp_skip_gain": 0.5}, "combined_skip_gain"),
            ({"block": "sas", "combined_skip_gain": 0.5}, "combined_skip_gain"),
            ({"mlp_gain": 0.0, "trainable_gains": []}, "mlp_gain=0"),
            ({"hidden_size": 100, "num_attention_heads": 12}, "num_attention_heads=12"),
            ({"num_key_value_heads": 4}, "num_key_value_heads"),
            ({"block": "pre_ln", "num_key_value_heads": 4, "matrix_init": "orthogonal"}, "matrix_init"),
            ({"block": "pre_ln", "num_key_value_heads": 5}, "num_attention_heads=12"),
            ({"block": "pre_ln", "trainable_gains": ["value_gain"]}, "reparameterized=True"),
            ({"block": "pre_ln", "value_gain": 0.5}, "reparameterized=True"),
            ({"pad_token_id": 50_000}, "pad_token_id=50000"),
            ({"matrix_init_tie": "all_layers"}, "matrix_init="),
            ({"matrix_init": "normal"}, "matrix_init"),
            ({"norm_type": "batchnorm"}, "norm_type='batchnorm'"),
            ({"hidden_act": "rleu"}, "Did you mean 'relu'"),
            ({"position_embedding_type": "rotary"}, "position_embedding_type='rotary'"),
            ({"projection_init_std": 0.1}, "projection_init_std=0.1"),
            ({"block": "v_skipinit", "matrix_init_std": 0.1}, "matrix_init_std=0.1"),
            ({"hidden_size": 9, "num_attention_heads": 3, "position_embedding_type": "sinusoidal"}, "hidden_size"),
            ({"hidden_size": 12, "num_attention_heads": 4, "position_embedding_type": "rope"}, "head size"),
            ({**TINY, "span": "adaptive", "position_embedding_type": "alibi"}, "ALiBi"),
            ({**TINY, "span": "adaptive", "block": "pre_ln", "num_key_value_heads": 2}, "spans"),
            ({**TINY, "frozen_spans": SPANS}, "span='adaptive'"),
            ({**TINY, "span": "dynamic", "frozen_spans": SPANS}, "span"),
            ({**TINY, "attention_pattern": {"kind": "star"}}, "pattern"),
            ({**TINY, "attention_pattern": [None, None, 3]}, "pattern"),
            ({**TINY, "attention_pattern": GlobalTokens([-1])}, "pattern"),
        ],
    ),
    (
        Sparse,
        [
            ({"attention_pattern": [None]}, "attention_pattern"),
            ({"attention_pattern": PerHead([Band(1, 1)] * 5)}, "per_head"),
            ({"position_embedding_type": "relative", "global_tokens": "first"}, "global_tokens=None"),
            ({"norm_position": "middle"}, "norm_position='middle'"),
            *(({"global_tokens": rule}, "global_tokens=") for rule in ("cls", 3, {"first": 1}, {"every": 2, "x": 1})),
            *(
                ({"global_tokens": {name: wrong}}, "global_tokens=")
                for name, wrong in (("every", 0), ("positions", []))
            ),
            ({"global_tokens": {"positions": [-1]}}, "global_tokens="),
        ],
    ),
    (
        tiny_sparse,
        [
            ({"global_tokens": {"positions": [3, 64]}}, "position 64"),
            ({"global_tokens": {"token_ids": [5, 61]}}, "token 61"),
            ({"attention_pattern": GlobalTokens([99999])}, "position 99999"),
            ({"attention_pattern": GlobalTokens([-65]) & Causal()}, "position -65"),
            ({"attention_pattern": Blocks(GlobalTokens([0, 8]), 8)}, "position 8"),
        ],
    ),
    (
        Sparse.longformer,
        [
            ({"attention_window": 5}, "attention_window=5"),
            ({"attention_window": [4, 8]}, "attention_window"),
            ({"num_attention_heads": 8, "num_dilated_heads": 9}, "num_dilated_heads=9"),
            ({"num_attention_heads": 8, "num_dilated_heads": 2.0}, "num_dilated_heads=2.0"),
            ({**SHAPE, "attention_dilation": [[1, 2], [1, 1, 1, 1]]}, "[1, 2]"),
        ],
    ),
    (Sparse.longformer_char_lm, [({"phase": 6}, "phase"), ({**TINY, "global_tokens": "first"}, "global_tokens=None")]),
    (
        Sparse.bigbird_itc,
        [
            ({"is_causal": True, "random_blocks_in_eval": "transformers"}, "random_blocks_in_eval"),
            ({"is_causal": True, "full_attention_up_to": 40}, "full_attention_up_to=40"),
            ({"full_attention_up_to": 0}, "full_attention_up_to=0"),
        ],
    ),
    (
        Seq2Seq,
        [
            ({"position_embedding_type": "relative"}, "position_embedding_type"),
            ({"matrix_init": "zeros"}, "matrix_init"),
            ({"global_tokens": "last"}, "global_tokens"),
            ({"full_attention_up_to": 0}, "full_attention_up_to=0"),
        ],
    ),
    *(
        (preset, [({"num_hidden_layers": 3}, "encoder_layers")])
        for preset in (Seq2Seq.led, Seq2Seq.vanilla, Seq2Seq.bigbird_pegasus)
    ),
    (
        Seq2Seq.led,
        [
            ({"attention_window": 5}, "attention_window"),
            ({"attention_window": [4, 4]}, "attention_pattern"),
            ({"size": "huge"}, "size"),
        ],
    ),
    (Seq2Seq.vanilla, [({"size": "large"}, "size")]),
    (
        reformer,
        [
            ({"attn_layers": ["lsh", "full"]}, "attn_layers"),
            ({"attn_layers": ["lsh"] * 3}, "attn_layers"),
            ({"num_buckets": 7}, "num_buckets"),
            ({"num_buckets": [2, 0]}, "num_buckets"),
            ({"axial_pos_shape": [4, 4]}, "max_position_embeddings=64"),
            ({"axial_pos_embds_dim": [8, 8]}, "hidden_size=32"),
            ({"position_embedding_type": "rope", "head_dim": 7}, "head_dim"),
            ({"tie_word_embeddings": True, "stream_join": "concat"}, "stream_join"),
            ({"attention_pattern": Band(1, 0)}, "pattern"),
            ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
        ],
    ),
    (
        hea.RoutingTransformerConfig,
        [
            ({"num_routing_heads": 9}, "num_routing_heads=9"),
            ({"layers_with_routing": [12]}, "layers_with_routing"),
            ({"share_qk": False}, "share_qk=False"),
            ({"membership": "causal", "is_causal": False}, "is_causal=True"),
            ({"membership": "top"}, "membership"),
            ({"include_self": False, "is_causal": False}, "include_self=False"),
            ({"include_self": False, "cluster_tokens": 1}, "include_self"),
        ],
    ),
    (
        hea.StarTransformerConfig,
        [
            ({"is_causal": True}, "is_causal"),
            ({"attention_pattern": Band(1, 1)}, "pattern"),
            ({"ring": "round"}, "ring"),
            ({"hidden_size": 33, "num_attention_heads": 3, "position_embedding_type": "sinusoidal"}, "hidden_size"),
            ({"tie_word_embeddings": True, "embedding_size": 8}, "embedding_size"),
        ],
    ),
    (
        hea.EtcTransformerConfig,
        [
            ({"is_causal": True}, "is_causal"),
            ({"relative_vocab_size": 27}, "relative_vocab_size"),
            ({"global_token_id": 61, "vocab_size": 61}, "global_token_id=61"),
            ({"position_embedding_type": "learned"}, "position_embedding_type"),
            ({"attention_pattern": CompressedKeys(2, 2)}, "CompressedKeys"),
        ],
    ),
    (
        hea.BPTransformerConfig,
        [
            ({"attention_pattern": Band(1, 1)}, "pattern"),
            ({"norm_position": "pre"}, "norm_position"),
            ({"position_embedding_type": "rope"}, "position_embedding_type"),
            ({"cross_layers": 2}, "separate_sentences=True"),
            (TREE, "separate_sentences"),
            ({"layer_losses": True}, "layer_losses"),
        ],
    ),
    (
        hea.BPSeq2SeqConfig,
        [
            ({"norm_position": "pre"}, "norm_position"),
            ({"sentence_end_token_id": 32_000}, "sentence_end_token_id=32000"),
        ],
    ),
    (hea.BPSeq2SeqConfig.wmt14, [({"num_hidden_layers": 3}, "num_hidden_layers=3")]),
    (
        tiny_compressed,
        [
            ({"mechanism": "linfomer"}, "Did you mean 'linformer'"),
            ({"mechanism": "performer"}, "positive_random"),
            ({"mechanism": ["linformer"]}, "mechanism"),
            ({"is_causal": True}, "is_causal"),
            ({"attention_pattern": Band(1, 1)}, "attention_pattern"),
            ({"position_embedding_type": "rope"}, "position_embedding_type"),
            ({"projected_tokens": 65}, "max_position_embeddings=64"),
            ({"projected_tokens": [4]}, "projected_tokens"),
            ({"projected_tokens": [4, 5], "projection_sharing": "layerwise"}, "projection_sharing"),
            ({"projected_tokens": 5, "projection_type": "mean"}, "projected_tokens"),
            ({"projection_type": "mean", "projection_bias": True}, "projection_bias"),
            ({"projection_first": True, "projection_sharing": "none"}, "projection_first"),
            ({"mechanism": "nystrom", "num_landmarks": 65}, "max_position_embeddings=64"),
            ({"num_landmarks": 8}, "mechanism='nystrom'"),
            ({**LINEAR, "projection_padding": "ignore"}, "mechanism='linformer'"),
            ({**PATTERN, "feature_seed": 1}, "mechanism='linear'"),
            ({**LINEAR, "compression_tokens": 2}, "compression_tokens"),
            ({**LINEAR, "prior_is_trained": False}, "mechanism='prior'"),
            ({**LINEAR, "normalizer_epsilon": -1}, "normalizer_epsilon"),
            ({**LINEAR, "feature_map": "positive_random", "normalizer_epsilon": 1e-3}, "normalizer_epsilon"),
            ({"mechanism": ["pattern", "linear"], "attention_pattern": [Band(1, 1), Band(2, 2)]}, "layer 1"),
            ({**LINEAR, "attention_pattern": Band(1, 1)}, "attention_pattern"),
            ({**PATTERN, "num_key_value_heads": 3}, "num_attention_heads=4"),
            ({"mechanism": ["pattern", "linear"], "num_key_value_heads": 2}, "num_key_value_heads"),
            ({"mechanism": "prior", "prior_width_tokens": 0}, "prior_width_tokens=0"),
            ({"mechanism": "reused_weights"}, "layer 0"),
            ({"mechanism": ["talking_heads", "reused_weights"]}, "talking_heads"),
            ({"mechanism": ["pattern", "reused_weights"], "attention_pattern": [Band(1, 1), Band(2, 2)]}, "None"),
            ({**COLLABORATIVE, "shared_key_width": 3}, "shared_key_width"),
            ({**COLLABORATIVE, "shared_key_width": 33}, "shared_key_width"),
            ({**PATTERN, "shared_key_width": 8}, "mechanism='collaborative_heads'"),
            ({**COLLABORATIVE, "num_key_value_heads": 2}, "num_key_value_heads"),
        ],
    ),
]


@pytest.mark.parametrize(
    ("build", "fields", "named"),
    [
        pytest.param(build, fields, named, id=f"{build.__qualname__}-{fields}"[:90])
        for build, cases in CONFIGS
        for fields, named in cases
    ],
)
def test_fields_that_are_refused(build: Callable[..., Any], fields: dict[str, Any], named: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=re.escape(named)):
        build(**fields)


FAMILIES = [pytest.param(case, id=name) for name, case in one_each().items()]


@pytest.mark.parametrize("case", FAMILIES)
def test_a_checkpoint_of_another_family(case: Any, tmp_path: Path) -> None:
    transformers.BertConfig(**{**TINY, "num_hidden_layers": 1}).save_pretrained(tmp_path)
    with pytest.raises(hea.CheckpointError, match="'bert'"):
        type(case.model()).from_pretrained(tmp_path)


@pytest.mark.parametrize("case", FAMILIES)
def test_tokens_of_another_shape_or_none(case: Any) -> None:
    for inputs in ({}, {"input_ids": random_ids(1, 5)[0]}):
        with pytest.raises(hea.InputError, match="input_ids"):
            case.model()(**inputs)


def test_kernels_that_would_drop_a_bias() -> None:
    config = hea.SimplifiedTransformerConfig(**TINY, block="pre_ln", position_embedding_type="alibi")
    model = hea.SimplifiedTransformerModel(config)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(hea.UnsupportedBackendError, match="ALiBi"):
        model(random_ids(1, 4))


@pytest.mark.parametrize("case", [case for case in one_each().values() if "AutoModelForMaskedLM" in case.heads])
def test_heads_of_the_other_direction(case: Any) -> None:
    name = type(case.model()).__name__.replace("MaskedLM", "CausalLM")
    if hasattr(hea, name):
        with pytest.raises(hea.ConfigurationError, match="is_causal=True"):
            getattr(hea, name)(case.config())


@pytest.mark.parametrize("case", [case for case in one_each().values() if "AutoModelForCausalLM" in case.heads])
def test_heads_of_one_direction(case: Any) -> None:
    name = type(case.model()).__name__.replace("CausalLM", "MaskedLM")
    if hasattr(hea, name):
        with pytest.raises(hea.ConfigurationError, match="is_causal=False"):
            getattr(hea, name)(case.config())


@pytest.mark.parametrize(
    "config",
    [
        hea.SimplifiedTransformerConfig(**TINY, position_embedding_type="learned"),
        Sparse.longformer(**TINY, attention_window=8),
        reformer(),
        reformer(position_embedding_type="learned"),
        hea.StarTransformerConfig(**TINY),
        tiny_compressed(),
        tiny_compressed(position_embedding_type="sinusoidal"),
    ],
)
def test_texts_longer_than_the_positions(config: Any) -> None:
    model = transformers.AutoModel.from_config(config)
    model(random_ids(1, 64))
    with pytest.raises(hea.InputError, match="64"):
        model(random_ids(1, 65))


def test_choices_have_an_axis_of_their_own() -> None:
    model = hea.SparseTransformerForMultipleChoice(Sparse.longformer(**TINY))
    for shape in ((2, 9), (9,), (1, 2, 3, 4)):
        with pytest.raises(hea.InputError, match="input_ids has shape"):
            model(torch.randint(3, 60, shape))


def test_a_field_that_is_changed_later() -> None:
    for config, name, value in (
        (spans(), "span_init", 2.0),
        (hea.SimplifiedTransformerConfig(**TINY), "block", "sas_q"),
        (hea.SimplifiedTransformerConfig(**TINY), "attention_pattern", {"kind": "star"}),
    ):
        setattr(config, name, value)
        with pytest.raises(hea.ConfigurationError, match=name.removeprefix("attention_")):
            transformers.AutoModel.from_config(config)


def test_random_blocks_that_cannot_be_replaced() -> None:
    pattern = Band(1, 1) | RandomBlocks(1, 4) & Band(16, 16)
    config = Sparse.bigbird_itc(block_tokens=4, **{**TINY, "max_position_embeddings": 128})
    config = Sparse(**{**config.to_dict(), "attention_pattern": pattern, "random_blocks_in_eval": "transformers"})
    with pytest.raises(hea.ConfigurationError, match="fixed"):
        hea.SparseTransformerModel(config).eval()(random_ids(1, 91))
