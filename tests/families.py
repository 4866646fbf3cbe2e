"""Every family with its models under contract, for all tests: a new family joins by its entry in `OURS`.

The contracts take all cases. Where one model of a family is enough, a test asks for what writes or reads texts, or for
the cases of its column of the table that `capabilities.py` fills; see `family.py`.
"""

from typing import Any

import transformers
from family import Family
from models_cases import Case
from seq2seq_cases import Seq2SeqCase
from sparsified_cases import SparsifiedCase
from star_cases import STAR

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, Dilated, GlobalTokens, PerHead


def simplified(name: str, **fields: Any) -> Case:
    return _case(f"simplified-{name}", hea.SimplifiedTransformerConfig, fields)


def sparse(name: str, preset: str | None, **fields: Any) -> Case:
    """Return a case of a preset; `fields` are the preset's own arguments and fields of the config."""
    fields = {**dict.fromkeys(("embedding_dropout", "hidden_dropout", "attention_dropout"), 0.0), **fields}
    return _case(f"sparse-{name}", hea.SparseTransformerConfig, fields, preset)


def span(name: str, preset: str = "enwik8_demo", **fields: Any) -> Case:
    """Return a case of adaptive span, whose limit and ramp are short enough to matter."""
    return _case(f"span-{name}", hea.AdaptiveSpanConfig, {"span_limit": 9, "span_ramp": 3, **fields}, preset)


def reformer(name: str, **fields: Any) -> Case:
    """Return a case of the Reformer, whose chunks are short enough to matter; its rotations never change."""
    chunks = {"lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4, "num_buckets": 4}
    fields = {"attn_layers": ["local", "lsh"], "hash_seed": 1, **chunks, **fields}
    return _case(f"reformer-{name}", hea.EfficientReformerConfig, fields)


def routing(name: str, **fields: Any) -> Case:
    """Return a case of routing heads whose clusters are short enough to matter."""
    fields = {"num_routing_heads": 2, "num_clusters": 3, "cluster_tokens": 4, **fields}
    return _case(f"routing-{name}", hea.RoutingTransformerConfig, fields)


def seq2seq(name: str, preset: str, shows_a_route: bool = False, is_traced: bool = True, **fields: Any) -> Seq2SeqCase:
    fields_of_it = tuple(fields.items())
    return Seq2SeqCase(f"seq2seq-{name}", hea.SparseSeq2SeqConfig, preset, fields_of_it, shows_a_route, is_traced)


def _case(name: str, config_class: type, fields: dict[str, Any], preset: str | None = None) -> Case:
    """Return a case; `shows_a_route` and `is_traced` are no fields of its config."""
    how = {flag: fields.pop(flag) for flag in ("shows_a_route", "is_traced") if flag in fields}
    return Case(name, config_class, tuple(fields.items()), preset=preset, **how)


SIMPLIFIED = Family(
    "simplified_transformer",
    (
        simplified("pre_ln", shows_a_route=True, block="pre_ln", num_key_value_heads=2, position_embedding_type="rope"),
        simplified("parallel", is_traced=False, block="parallel", position_embedding_type="alibi"),
        simplified("v_skipinit", is_traced=False, block="v_skipinit"),
        simplified("sas", shows_a_route=True, is_traced=False, block="sas", position_embedding_type="rope"),
        simplified("sas_p", is_traced=False, block="sas_p", position_embedding_type="learned"),
        simplified("sas_p_no_norm", is_traced=False, block="sas_p_no_norm"),
        simplified(
            "sas_p-alibi",
            shows_a_route=True,
            block="sas_p",
            position_embedding_type="alibi",
            gated_mlp=True,
            hidden_act="gelu",
        ),
        simplified("sas-orthogonal", block="sas", matrix_init="orthogonal", value_gain=0.5, projection_gain=0.5),
        simplified("pre_ln-masked", is_traced=False, block="pre_ln", is_causal=False, norm_type="layernorm"),
        simplified("sas-masked", block="sas", is_causal=False, position_embedding_type="rope"),
        simplified(
            "sas_p-masked",
            shows_a_route=True,
            is_traced=False,
            block="sas_p",
            is_causal=False,
            position_embedding_type="scaled_sinusoidal",
        ),
        simplified("sas-span", block="sas", position_embedding_type="rope", span="adaptive", span_limit=9, span_ramp=3),
        simplified("sas_p-span", is_traced=False, block="sas_p", span="dynamic", span_limit=9, span_ramp=3),
        simplified(
            "sas_p-masked-span",
            is_traced=False,
            block="sas_p",
            is_causal=False,
            span="adaptive",
            span_limit=9,
            span_ramp=3,
        ),
    ),
    decoder="simplified-sas",
    encoder="simplified-sas_p-masked",
    trained="simplified-sas",
    instead={
        "TP": ("simplified-sas", "simplified-sas_p-alibi", "simplified-sas-span"),
        "halo": (simplified("band", block="pre_ln", attention_pattern=Band(4, 0)),),
    },
)

SPARSE = Family(
    "sparse_transformer",
    (
        sparse(
            "longformer",
            "longformer",
            shows_a_route=True,
            is_traced=False,
            attention_window=[4, 8],
            pad_token_id=0,
            sep_token_id=2,
        ),
        sparse("longformer-first", "longformer", attention_window=6, global_tokens="first", attention_dilation=[1, 2]),
        sparse(
            "longformer-causal",
            "longformer",
            is_traced=False,
            attention_window=6,
            is_causal=True,
            global_tokens="first",
        ),
        sparse(
            "longformer-causal-global",
            "longformer",
            attention_window=6,
            is_causal=True,
            global_tokens={"every": 5},
            global_projections=True,
            attention_dilation=[1, 2],
            num_dilated_heads=2,
        ),
        sparse("bigbird", "bigbird_itc", block_tokens=2, num_random_blocks=1, sep_token_id=2),
        sparse(
            "bigbird-causal", "bigbird_itc", shows_a_route=True, block_tokens=2, num_random_blocks=1, is_causal=True
        ),
        sparse("char_lm", "longformer_char_lm"),
        sparse("sliding-pre", "sliding", left=3, norm_position="pre", position_embedding_type="sinusoidal"),
        sparse(
            "sliding-grouped",
            "sliding",
            is_traced=False,
            left=3,
            is_causal=True,
            num_key_value_heads=2,
            norm_type="rmsnorm",
        ),
        sparse("block_local", "block_local", block_tokens=4, gated_mlp=True, type_vocab_size=2),
        sparse("strided", "strided", stride=3),
    ),
    instead={
        "TP": ("sparse-bigbird", "sparse-longformer-causal-global"),
        "halo": (sparse("globals", None, is_causal=False, attention_pattern=Band(4, 4) | GlobalTokens([0])),),
    },
)

SEQ2SEQ = Family(
    "sparse_seq2seq",
    (
        seq2seq("led", "led", shows_a_route=True, attention_window=[4, 6]),
        seq2seq("led-question", "led", attention_window=4, global_tokens={"token_ids": [60]}),
        seq2seq("bigbird_pegasus", "bigbird_pegasus", block_tokens=2, num_random_blocks=1),
        seq2seq("vanilla", "vanilla"),
        seq2seq(
            "vanilla-pre",
            "vanilla",
            is_traced=False,
            norm_position="pre",
            position_embedding_type="learned",
            lm_head_bias=True,
        ),
        seq2seq(
            "both-sparse",
            "vanilla",
            attention_pattern={
                "encoder": {"kind": "band", "left": 2, "right": 2},
                "decoder": {"kind": "band", "left": 3, "right": 0},
            },
            norm_type="rmsnorm",
        ),
    ),
    refuses={"halo": "it joins several models"},
)

SPANS = Family(
    "adaptive_span",
    (
        span("adaptive", is_traced=False),
        span("fixed", span="fixed"),
        span("dynamic", span="dynamic"),
        span("modern", "modern", shows_a_route=True, is_traced=False),
        span("modern-dynamic", "modern", is_traced=False, span="dynamic"),
        span("modern-frozen", "modern", span_penalty=0.0, frozen_spans=[[0.0, 2.5, 9.0, 4.0], [1.0, 1.0, 7.2, 0.0]]),
        span("encoder", "modern", is_traced=False, is_causal=False),
    ),
    decoder="span-modern",
    trained="span-modern",
    instead={"TP": ("span-modern", "span-dynamic"), "ZeRO": ("span-modern-dynamic",)},
    refuses={
        "Ulysses": "mode='heads' cannot divide a layer with learned parts of scores",
        "ZeRO": "DeepSpeed's ZeRO trains numbers of its own in place of learned spans",
    },
)

UNWRITTEN = {"ONNX": "cannot be written as ONNX, whose exporter has no stable sort"}
REFORMER = Family(
    "efficient_reformer",
    (
        reformer("causal", shows_a_route=True, is_causal=True, chunk_by_bucket=True),
        reformer("masked", shows_a_route=True, num_hashes=2, local_wraps=True),
    ),
    trained="reformer-masked",
    instead={
        "TP": ("reformer-causal", "reformer-masked"),
        # whose local layers would be refused before
        "ONNX": (reformer("lsh", attn_layers=["lsh"], num_hidden_layers=1),),
    },
    refuses={
        "halo": "its layers sort all tokens of a text by their buckets",
        "prefix": "Prefix tuning cannot put keys",
        **UNWRITTEN,
    },
)

ROUTING = Family(
    "routing_transformer",
    (
        routing("causal", shows_a_route=True, attention_pattern=Band(3, 0), max_relative_distance=5),
        routing(
            "rope",
            position_embedding_type="rope",
            norm_position="pre",
            include_self=False,
            layers_with_routing=[1],
            num_routing_heads=4,
            head_map=True,
            gated_mlp=True,
        ),
        routing("masked", is_causal=False, max_relative_distance=3),
    ),
    decoder="routing-rope",
    instead={"TP": ("routing-causal", "routing-masked"), "ONNX": ("routing-masked",)},
    refuses={
        "halo": "routing heads choose keys among all tokens",
        "prefix": "Prefix tuning cannot give that",
        **UNWRITTEN,
    },
)

OURS = (SIMPLIFIED, SPARSE, SEQ2SEQ, SPANS, REFORMER, ROUTING, STAR)
BART = {"layers": 1, "attention_heads": 4, "ffn_dim": 48}
SPARSIFIED = Family(
    "sparsified",
    (
        SparsifiedCase(
            "llama",
            transformers.LlamaConfig,
            "AutoModelForCausalLM",
            PerHead([Band(3, 0), Dilated(12, 0, 3) | GlobalTokens([0])]),
            (("num_key_value_heads", 2),),
        ),
        SparsifiedCase("bert", transformers.BertConfig, "AutoModelForMaskedLM", Band(2, 2) | GlobalTokens([0])),
        SparsifiedCase(
            "bart",
            transformers.BartConfig,
            "AutoModelForSeq2SeqLM",
            Band(4, 4),
            (
                ("num_hidden_layers", 1),
                *((f"{side}_{name}", size) for side in ("encoder", "decoder") for name, size in BART.items()),
            ),
        ),
    ),
    instead={"Hub with": ("llama", "bart"), "FSDP2": ("llama", "bert")},
)
FAMILIES = (*OURS, SPARSIFIED)

# by family, what writes a text and what reads one at once; an encoder-decoder does both
WRITERS = {family.name: family.writer for family in FAMILIES if family.writer is not None}
READERS = {family.name: family.reader for family in FAMILIES if family.reader is not None}
DECODERS = [family.name for family in FAMILIES if family.writer is not None and not family.is_encoder_decoder]
ENCODER_DECODERS = [family.name for family in FAMILIES if family.is_encoder_decoder]
# the models of one stack, which have contracts of their own, and encoder-decoders
CASES = [case for family in OURS if not family.is_encoder_decoder for case in family.cases]
SEQ2SEQ_CASES = [case for family in OURS if family.is_encoder_decoder for case in family.cases]
BY_NAME = {case.name: case for case in (*CASES, *SEQ2SEQ_CASES)}


def one_each() -> dict[str, Any]:
    """Return the first case of each family of ours and direction, which together have all of its heads, by name."""
    found: dict[Any, Any] = {}
    for case in BY_NAME.values():
        found.setdefault((case.config_class, case.main_head), case)
    return {case.name: case for case in found.values()}
