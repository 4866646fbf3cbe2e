"""Under tensor parallelism every process has some of the heads, and follows for them what one process would.

Two processes (gloo, CPU) run `tensor_parallel_script.py` on models that this process saves and computes.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bp_seq2seq_cases import BP_SEQ2SEQ
from distributed import run_distributed
from families import OURS
from models_cases import randomize
from tensor_parallel_script import IN_TRAINING, TRAINED, results
from transformers import GraniteSWAConfig, GraniteSWAForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_efficient_attn as hea
from hf_efficient_attn.integration import model_info
from hf_efficient_attn.patterns import Band, Causal, Dilated, PerHead, RandomBlocks

SCRIPT = Path(__file__).parents[1] / "tensor_parallel_script.py"
# of every family, cases whose heads differ, or whose parts are cut; of encoder-decoders and sparsified models, below
CASES = [case for family in OURS if not family.is_encoder_decoder for case in family.column("TP")]
# weights that differ in their last bit move spans, whose gradient is many tokens long, further in one process, too
SPAN_TOLERANCE = 1e-5
PER_HEAD = PerHead([Band(3, 0), Dilated(12, 0, 3), Band(0, 0) | RandomBlocks(1, 4, is_causal=True), Causal()])
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}


def llama(pattern: Any = PER_HEAD, num_key_value_heads: int = 4) -> PreTrainedModel:
    """Return a Llama whose eight heads share four key heads and follow four patterns."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=num_key_value_heads, pad_token_id=0))
    return hea.sparsify(model, pattern)


def indexed(stage: str) -> PreTrainedModel:
    """Return a Llama whose indexers learn from what all eight heads read."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=4, pad_token_id=0))
    return hea.index_stage(hea.index(model, top_k=5, num_heads=2), stage)


def with_sinks() -> PreTrainedModel:
    """Return a model whose heads have sinks, which tensor parallelism deals out with them."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    config = GraniteSWAConfig(**SIZES, **layers, num_key_value_heads=4, pad_token_id=0)
    return hea.sparsify(GraniteSWAForCausalLM(config), PER_HEAD)


def sparse() -> PreTrainedModel:
    """Return one of our own, of which only the MLPs are cut."""
    return hea.SparseTransformerForCausalLM(
        hea.SparseTransformerConfig(**SIZES, is_causal=True, attention_pattern=PER_HEAD.to_dict(), pad_token_id=0)
    )


def encoder_decoder(**fields: Any) -> PreTrainedModel:
    """Return an encoder-decoder whose head is the embedding, and has a bias if it is asked for."""
    sizes = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"}
    config = hea.SparseSeq2SeqConfig.led(
        **sizes, encoder_layers=1, decoder_layers=1, attention_window=4, pad_token_id=0, **fields
    )
    return hea.SparseSeq2SeqForConditionalGeneration(config)


MODELS = {
    "llama": llama,
    "llama-random": partial(llama, [Band(3, 0) | RandomBlocks(1, 4, is_causal=True), PER_HEAD], 2),
    "index-warmup": partial(indexed, "warmup"),
    "index-sparse": partial(indexed, "sparse"),
    "sinks": with_sinks,
    "sparse": sparse,
    "tied": partial(encoder_decoder, lm_head_bias=True),
    "untied": partial(encoder_decoder, tie_word_embeddings=False),
    "trees": partial(BP_SEQ2SEQ.cases[0].model, vocab_size=64),
    **{case.name: partial(case.model, vocab_size=64) for case in CASES},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models, what one process computes with them, and what two do."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    torch.manual_seed(0)
    for name, build in MODELS.items():
        # with start values the scores, and hence gradients of queries and keys, are next to nothing
        model = randomize(build().eval())
        model.save_pretrained(folder / name)
        torch.save(results(model, name in IN_TRAINING), folder / f"{name}-alone.pt")
    run_distributed(SCRIPT, folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_compute_what_one_does(folder: Path, name: str) -> None:
    alone, together = torch.load(folder / f"{name}-alone.pt"), torch.load(folder / f"{name}.pt")
    assert together.keys() - {"refused"} == alone.keys()
    assert alone["logits"].abs().max() > 1e-3
    assert alone.get("auxiliary_loss", 1) > 0
    # of gradients that are 0 but for rounding, as those of the keys' biases, nothing more can be said
    trained = {name for name in alone if name.startswith(TRAINED)}
    rounding = 2e-6 * max(float(alone[name].abs().max()) for name in alone.keys() - trained - {"logits"})
    for quantity in alone.keys() - trained:
        expected = alone[quantity]
        largest = float(expected.abs().max())
        torch.testing.assert_close(together[quantity], expected, atol=1e-5 * largest + rounding, rtol=1e-5)
    for weight in trained:
        atol = SPAN_TOLERANCE if weight.endswith("spans.ratio") else 1e-6
        torch.testing.assert_close(together[weight], alone[weight], atol=atol, rtol=0)


def test_key_heads_that_processes_cannot_share_are_refused() -> None:
    model = llama(num_key_value_heads=1)
    # what transformers notes in a model that it has dealt out to processes
    model._tp_size = 2
    with pytest.raises(hea.UnsupportedBackendError, match="tp_size=2"):
        model(torch.ones(1, 4, dtype=torch.long))


def test_every_family_takes_part() -> None:
    types = {build().config.model_type for build in MODELS.values()}
    assert types >= {family.name for family in OURS}


def test_heads_without_numbers_are_refused(folder: Path) -> None:
    message = bytes(torch.load(folder / "llama.pt")["refused"].tolist()).decode()
    assert "LlamaAttention computes 4 of 8 heads" in message


def test_an_indexer_learns_from_no_heads_whose_processes_are_unknown() -> None:
    layer = indexed("warmup").model.layers[0].self_attn
    assert model_info.head_group(layer, 8) is None
    with pytest.raises(
        hea.UnsupportedBackendError, match="computes 4 of 8 heads in this process, .* learns from all heads"
    ):
        model_info.head_group(layer, 4)
