"""Models and calls that `shard_sequence` refuses, before any process is asked."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from families import FAMILIES
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.patterns import Band, BlockLocal, bigbird
from hf_efficient_attn.training.shardable_models import first_reason

# all that is asked of a mesh before a model is refused
MESH = SimpleNamespace(ndim=1, get_group=None)
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIDES = {"vocab_size": 32, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
BART = {"vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, **HEADS}
PAIR = {"num_key_value_heads": 2, "pad_token_id": 0}
# its layers are in chunks by default, for which it is refused as well
LLAMA4 = {**SIZES, **PAIR, "head_dim": 8, "num_local_experts": 2, "layer_types": ["full_attention"] * 2}


def efficient(config: Any, name: str = "AutoModelForCausalLM") -> Any:
    """Return a model of transformers."""
    return getattr(transformers, name).from_config(config, attn_implementation="efficient")


def sparse(task: str = "MaskedLM", **fields: Any) -> Any:
    """Return a sparse encoder, or a decoder."""
    fields = {"is_causal": task == "CausalLM", "attention_pattern": Band(2, 0), **fields}
    config = hea.SparseTransformerConfig(**SIZES, **fields)
    return getattr(hea, f"SparseTransformerFor{task}")(config)


def llama(**fields: Any) -> Any:
    return efficient(transformers.LlamaConfig(**SIZES, **PAIR, **fields))


def with_convolution() -> Any:
    """Return a Llama whose MLP looks at neighbouring tokens, under names that say nothing of it."""
    model = llama()
    model.model.layers[1].mlp.add_module("gate_proj", torch.nn.Conv1d(16, 16, 3))
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "short texts": (lambda: sparse(full_attention_up_to=8), "full_attention_up_to depends on the length"),
    "random blocks": (
        lambda: sparse(attention_pattern=bigbird(2, 1), random_blocks_in_eval="transformers"),
        "random_blocks_in_eval='transformers' attends to the first block",
    ),
    "pooler": (
        lambda: efficient(transformers.BertConfig(**SIZES), "AutoModel"),
        "its pooler would use the first token",
    ),
    "sequence head": (lambda: sparse("SequenceClassification"), "its loss, .ForSequenceClassification., needs"),
    "question head": (lambda: sparse("QuestionAnswering"), "its loss, .ForQuestionAnswering., needs the whole text"),
    "sequence head in-tree": (
        lambda: efficient(transformers.BertConfig(**SIZES), "AutoModelForSequenceClassification"),
        "its loss, .ForSequenceClassification., needs the whole text",
    ),
    "encoder-decoder in-tree": (
        lambda: efficient(transformers.T5Config(**SIDES), "AutoModelForSeq2SeqLM"),
        "it combines",
    ),
    "routers": (
        lambda: efficient(transformers.MixtralConfig(**SIZES, **PAIR, num_local_experts=2, output_router_logits=True)),
        "the loss of its routers needs all tokens",
    ),
    "other attention": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **PAIR)),
        'its attention is .sdpa.. Load it with attn_implementation="efficient"',
    ),
    "no positions": (lambda: efficient(transformers.BartConfig(**BART)), "it takes no position_ids"),
    "recurrent layers": (
        lambda: efficient(
            transformers.Lfm2Config(**SIZES, **PAIR, layer_types=["conv", "full_attention"], block_multiple_of=8)
        ),
        "layers of the kinds conv, which keep a state",
    ),
    "recurrence beside attention": (
        lambda: efficient(
            transformers.FalconH1Config(**SIZES, **PAIR, mamba_d_ssm=32, mamba_n_heads=2, mamba_d_state=8, head_dim=8)
        ),
        "it passes a state from token to token|of the kinds",
    ),
    "masks that scale": (
        lambda: efficient(transformers.EsmConfig(**SIZES, pad_token_id=1, token_dropout=True), "AutoModelForMaskedLM"),
        "token_dropout=True scales tokens by the share of mask tokens",
    ),
    "trigrams": (
        lambda: efficient(
            transformers.MobileBertConfig(**SIZES, embedding_size=8, intra_bottleneck_size=16), "AutoModelForMaskedLM"
        ),
        "trigram_input=True uses the embeddings of neighbouring tokens",
    ),
    "queries scaled by their place": (
        lambda: efficient(transformers.Llama4TextConfig(**LLAMA4)),
        "attn_temperature_tuning=True scales queries by the number of tokens before them",
    ),
    "a loss that nothing names": (
        lambda: efficient(transformers.ElectraConfig(**SIZES, embedding_size=16), "AutoModelForPreTraining"),
        "unknown whether its loss is a sum over tokens .loss_type is None.",
    ),
    "two heads": (
        lambda: transformers.GPT2DoubleHeadsModel._from_config(
            transformers.GPT2Config(**SIZES), attn_implementation="efficient"
        ),
        "unknown whether its loss is a sum over tokens",
    ),
    "convolution": (with_convolution, "model.layers.1.mlp.gate_proj mixes neighbouring tokens outside of attention"),
}
# whole families, with the cells of the table of model_cards/engine.md
FAMILIES_REFUSED = {family.name: family for family in FAMILIES if "halo" in family.refuses}
REFUSED |= {name: (family.column("halo")[0].model, family.refuses["halo"]) for name, family in FAMILIES_REFUSED.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_model_is_refused(name: str) -> None:
    build, sentence = REFUSED[name]
    model = build()
    with pytest.raises(hea.UnsupportedBackendError, match=f"cannot compute a text that several.*({sentence})"):
        hea.shard_sequence(model, MESH)
    # and is left as it was
    assert not any("_sequence_shards" in module.__dict__ for module in model.modules())


def test_a_layer_without_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no module that tells, and keeps no state; but what it reads, nobody says."""
    layer_class = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    plain = layer_class.forward

    def forward(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        return hidden_states.cumsum(1) if self.self_attn.layer_idx == 1 else plain(self, hidden_states, **options)

    monkeypatch.setattr(layer_class, "forward", forward)
    with pytest.raises(hea.UnsupportedBackendError, match="layer 1 does not call the attention interface"):
        hea.shard_sequence(llama(), MESH)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("mesh", [MESH, None])
def test_wrapped_models_are_refused(mesh: Any) -> None:
    wrapped = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    with pytest.raises(
        hea.UnsupportedBackendError, match="not PeftModelForCausalLM.*shard the model first, then wrap it"
    ):
        hea.shard_sequence(wrapped, mesh)


def test_models_that_can() -> None:
    assert first_reason(llama()) is None
    assert first_reason(sparse("CausalLM")) is None
    assert first_reason(sparse("TokenClassification", attention_pattern=BlockLocal(4))) is None
    pooled = transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False)
    pooled.set_attn_implementation("efficient")
    assert first_reason(pooled) is None


@pytest.fixture
def alone(tmp_path: Any) -> Any:
    """A mesh of this process alone."""
    distributed.init_process_group("gloo", store=distributed.FileStore(f"{tmp_path}/store", 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_calls_that_are_refused(alone: Any) -> None:
    model = hea.shard_sequence(hea.sparsify(llama(), Band(2, 0)), alone)
    ids = torch.arange(8)[None]
    assert torch.isfinite(model(ids, labels=ids).loss)
    with pytest.raises(hea.UnsupportedBackendError, match="cannot generate: a new token belongs to one process"):
        model.generate(ids)
    with pytest.raises(hea.UnsupportedBackendError, match="keys of earlier calls, or keys learned by prefix tuning"):
        model(ids, **{CACHE_ARGUMENT: transformers.DynamicCache()})
    with pytest.raises(hea.UnsupportedBackendError, match="cannot be called with decoder_input_ids"):
        model(ids, decoder_input_ids=ids)
    with pytest.raises(hea.UnsupportedBackendError, match="cannot be compiled"):
        torch.compile(copy.deepcopy(model), backend="eager")(ids)


def test_outputs_of_the_whole_text_are_refused(alone: Any) -> None:
    config = transformers.CLIPTextConfig(**SIZES, eos_token_id=7)
    model = transformers.CLIPTextModel._from_config(config, attn_implementation="efficient")
    with pytest.raises(hea.UnsupportedBackendError, match=r"CLIPTextModel returns pooler_output of shape \[1, 16\]"):
        hea.shard_sequence(model, alone)(torch.arange(8)[None])


def test_subclasses_shift_their_labels(alone: Any) -> None:
    """By whose names transformers knows no loss."""

    class Tuned(transformers.LlamaForCausalLM):
        pass

    ids = torch.arange(8)[None]
    model = Tuned._from_config(transformers.LlamaConfig(**SIZES, **PAIR), attn_implementation="efficient")
    expected = model(ids, labels=ids).loss
    assert model.loss_type is None
    torch.testing.assert_close(hea.shard_sequence(model, alone)(ids, labels=ids).loss, expected)


@pytest.mark.parametrize("mesh", ["sp", 2, torch.ones(2)], ids=repr)
def test_what_is_no_mesh_is_refused(mesh: Any) -> None:
    with pytest.raises(hea.ConfigurationError, match=r"mesh is .* must be a .*DeviceMesh .* init_device_mesh\("):
        hea.shard_sequence(llama(), mesh)


def test_an_unknown_mode_is_refused_without_a_mesh_too() -> None:
    with pytest.raises(hea.ConfigurationError, match="mode is 'ring'; it must be one of auto, halo, heads"):
        hea.shard_sequence(llama(), None, mode="ring")
