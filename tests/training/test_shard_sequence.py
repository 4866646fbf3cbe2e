"""Models whose texts lie on several processes: logits, loss and gradients of one process, and what is refused.

Processes (gloo, CPU) run `sharded_models_script.py` on models that this process saves.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distributed import run_distributed
from families import OURS
from sharded_models_script import PARTS, batch, load, results

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, BlockLocal, Causal, Dilated, GlobalTokens, PerHead, bigbird

SCRIPT = Path(__file__).parents[1] / "sharded_models_script.py"
SIZES = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 6}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 4}
GLOBALS = Band(4, 4) | GlobalTokens([0])

OTHER_BATCH = "InputError: .* share every text, but process [12] got another batch than process 0"


def llama(**fields: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **fields))


def roberta(**fields: Any) -> Any:
    return transformers.RobertaConfig(**SIZES, num_labels=64, max_position_embeddings=40, **fields)


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    """Return rotary frequencies that depend on the length of the text, which is more than 8 tokens."""
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **fields}


def sparse(is_causal: bool, pattern: Any, **fields: Any) -> Any:
    config = hea.SparseTransformerConfig(**SIZES, is_causal=is_causal, attention_pattern=pattern, **fields)
    return (hea.SparseTransformerForCausalLM if is_causal else hea.SparseTransformerForMaskedLM)(config)


def chooses(model: Any) -> Any:
    """Return a model whose indexers choose what its layers read."""
    return hea.index_stage(hea.index(model, top_k=5, num_heads=2), "sparse")


# (model, pattern to sparsify it with), a line a case
CASES: dict[str, Any] = {
    "llama": lambda: hea.sparsify(llama(), Band(6, 0) | GlobalTokens([0, 1])),
    "llama_packed": lambda: hea.sparsify(llama(), [Band(3, 0), Causal()]),
    "llama_per_head_checkpointed": lambda: hea.sparsify(llama(), PerHead([Band(3, 0), Dilated(12, 0, 3)])),
    "gemma": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SIZES, **SLIDING, num_key_value_heads=2)
    ),
    "modernbert": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            **SIZES, local_attention=6, global_attn_every_n_layers=2, pad_token_id=0, cls_token_id=1, sep_token_id=2
        )
    ),
    # sinks, and layers that slide by turns
    "gpt_oss": lambda: hea.sparsify(
        transformers.GraniteSWAForCausalLM(
            transformers.GraniteSWAConfig(**SIZES, **SLIDING, num_key_value_heads=2, pad_token_id=0)
        ),
        [None, Band(6, 0) | GlobalTokens([0])],
    ),
    "bert": lambda: hea.sparsify(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)), GLOBALS),
    "roberta": lambda: hea.sparsify(transformers.RobertaForTokenClassification(roberta()), BlockLocal(4)),
    # whose loss transformers chooses without a name for it
    "gpt2": lambda: hea.sparsify(transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)), Band(6, 0)),
    # who count positions by the mask, by ids and from the number of the padding token on
    "opt": lambda: hea.sparsify(
        transformers.OPTForCausalLM(transformers.OPTConfig(**SIZES, ffn_dim=32, word_embed_proj_dim=24)), Band(6, 0)
    ),
    "esm": lambda: hea.sparsify(
        transformers.EsmForMaskedLM(transformers.EsmConfig(**SIZES, pad_token_id=1, mask_token_id=4)), Band(4, 4)
    ),
    "roberta_embedded": lambda: hea.sparsify(transformers.RobertaForMaskedLM(roberta()), Band(4, 4)),
    "llama_dynamic": lambda: hea.sparsify(
        llama(head_dim=4, max_position_embeddings=8, rope_parameters=rope("dynamic")), Band(6, 0)
    ),
    # the first processes alone would take the short factors
    "llama_longrope": lambda: hea.sparsify(
        llama(
            head_dim=4,
            rope_parameters=rope(
                "longrope", short_factor=[1.0, 2.0], long_factor=[3.0, 4.0], original_max_position_embeddings=20
            ),
        ),
        Band(6, 0),
    ),
    # whose indexers learn, and choose, among the tokens of all processes
    "llama_indexed": lambda: hea.index(llama(head_dim=4), top_k=5, num_heads=2),
    "llama_indexed_packed": lambda: chooses(llama(head_dim=4)),
    "decoder_packed": lambda: sparse(True, bigbird(2, 1, causal=True)),
}
# of every family what has no refusal, with six heads for two and for three processes
OTHERS = tuple(CASES)
ROPE = {**SIZES, "is_causal": True, "position_embedding_type": "rope"}
CASES |= {
    "sparse-indexed": lambda: chooses(hea.SparseTransformerForCausalLM(hea.SparseTransformerConfig(**ROPE))),
    "sas-indexed": lambda: chooses(
        hea.SimplifiedTransformerForCausalLM(hea.SimplifiedTransformerConfig(**ROPE, block="sas"))
    ),
}
CASES["sparse-indexed_packed"] = CASES["sparse-indexed"]
SIX_HEADS = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")}
for family in (family for family in OURS if "halo" not in family.refuses):
    for case in family.column("halo"):
        CASES[case.name] = partial(case.model, **SIX_HEADS)
        CASES[f"{case.name}_heads_packed"] = CASES[case.name]
# every third of these is often; every family is among the others
PACKED = [name for name in CASES if name.endswith("_heads_packed")]
RARE = [name for name in PACKED if name not in PACKED[::3]]


def build(name: str) -> Any:
    """Return a model with weights large enough for attention to matter, and without dropout."""
    torch.manual_seed(0)
    model = CASES[name]()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    for field in ("hidden_dropout", "attention_dropout", "embedding_dropout"):
        if hasattr(model.config, field):
            setattr(model.config, field, 0.0)
    return model


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.thorough)])
def folder(request: pytest.FixtureRequest, thorough: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models, what one process computes with them, and what several do."""
    folder = tmp_path_factory.mktemp("sharded")
    for name in (name for name in CASES if thorough or name not in RARE):
        build(name).save_pretrained(folder / name)
        model = load(folder / name)
        torch.save(results(model, batch(name, SIZES["vocab_size"])), folder / f"{name}-alone.pt")
    for part in range(PARTS):
        run_distributed(SCRIPT, folder, str(part), world_size=request.param)
    return folder


def check_alike(name: str, alone: dict[str, Any], together: dict[str, Any]) -> None:
    """Check what processes compute of a case, but for the logits of padding."""
    inputs = batch(name, SIZES["vocab_size"])
    is_token = inputs.get("attention_mask", torch.ones(1, 1)).bool()[..., None]
    for quantity, expected in alone.items():
        found = together[quantity]
        if quantity == "logits":
            expected, found = (each.where(is_token, 0.0) for each in (expected, found))
        # norms of transformers compute in single precision, whatever the weights have
        tolerance = 1e-10 if name not in OTHERS else 1e-6
        atol = tolerance * max(float(expected.abs().max()), 1e-2)
        assert float((found - expected).abs().max()) <= atol, quantity


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in RARE)) for name in CASES])
def test_processes_compute_what_one_does(folder: Path, name: str) -> None:
    check_alike(name, torch.load(folder / f"{name}-alone.pt"), torch.load(folder / f"{name}.pt"))


def test_positions_beyond_a_table_are_refused_by_all_processes(folder: Path) -> None:
    said = torch.load(folder / "sparse-chosen.pt")["said"]
    assert re.match("InputError: The sequence reaches position 66, but the learned position table has", said)


def test_heads_that_read_what_one_indexer_chooses_are_not_dealt_out(folder: Path) -> None:
    said = torch.load(folder / "sparse-indexed.pt")["said"]
    assert re.match("ConfigurationError: mode='heads' cannot split the heads of SparseAttention", said)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("other rows", rf"{OTHER_BATCH} \(different input_ids, labels\)"),
        ("other labels", rf"{OTHER_BATCH} \(different labels\)"),
        ("no labels", rf"{OTHER_BATCH} \(different labels\)"),
        ("other mask", rf"{OTHER_BATCH} \(different attention_mask\)"),
        ("other documents", rf"{OTHER_BATCH} \(different position_ids\)"),
        ("other length", rf"{OTHER_BATCH} \(different input_ids, attention_mask, position_ids, labels\)"),
        ("weights", "UnsupportedBackendError: .* cannot be called with output_attentions"),
        ("matrix", "UnsupportedBackendError: A mask matrix cannot be split"),
        ("labels", "UnsupportedBackendError: .* cannot be called with output_router_logits"),
        (
            "restarts",
            "InputError: position_ids restart .* in LlamaForCausalLM with an attention_mask this does not begin",
        ),
        ("short", "InputError: A text of 1 tokens"),
        ("mesh", "ConfigurationError: The mesh has 2 dimensions"),
    ],
)
def test_what_is_refused(folder: Path, what: str, message: str) -> None:
    assert re.match(message, torch.load(folder / "llama.pt")["said"][what])


def test_a_model_reads_whole_texts_again(folder: Path) -> None:
    alone, together = torch.load(folder / "llama-alone.pt"), torch.load(folder / "llama.pt")
    torch.testing.assert_close(together["whole again"], alone["logits"], atol=1e-6, rtol=0)
