"""The simplified transformers under contract; a family of `families.py`."""

from typing import Any

from family import Family
from models_cases import Case, case_of

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band


def simplified(name: str, **fields: Any) -> Case:
    return case_of(f"simplified-{name}", hea.SimplifiedTransformerConfig, fields)


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
        "halo": (
            simplified("band", block="pre_ln", attention_pattern=Band(4, 0)),
            "simplified-sas",
            "simplified-sas_p-masked",
            simplified("sas-band", block="sas", attention_pattern=Band(4, 0)),
            "simplified-sas_p-alibi",
            "simplified-sas_p-span",
            simplified("alibi-band", block="sas", attention_pattern=Band(4, 0), position_embedding_type="alibi"),
        ),
    },
)
