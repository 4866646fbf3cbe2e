"""The families under contract, and tiny models of them. A new family joins by its lines in `CASES`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

import hf_efficient_attn as hea
from hf_efficient_attn.models.register import HEADS
from hf_efficient_attn.models.spans.module import span_modules
from hf_efficient_attn.patterns import Band

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# how far two ways to the same numbers may be apart
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One configuration of one family: `config()` builds it, `heads` are the Auto heads it must have."""

    name: str
    config_class: type
    fields: tuple[tuple[str, Any], ...]
    # the cases that do take, together, every way from a model to a kernel
    shows_a_route: bool = False
    preset: str | None = None

    def config(self, **changes: Any) -> transformers.PreTrainedConfig:
        build = self.config_class if self.preset is None else getattr(self.config_class, self.preset)
        return build(**{**TINY, **dict(self.fields), **changes})

    @property
    def is_traced(self) -> bool:
        """Whether it is compiled and exported, which takes seconds."""
        return self.name not in CODE_OF_OTHERS

    @property
    def fewest_layers(self) -> dict[str, int]:
        """The change to as few layers as its lists allow, for what takes its time by the layer."""
        return {} if any(isinstance(value, list) for _, value in self.fields) else {"num_hidden_layers": 1}

    @property
    def is_causal(self) -> bool:
        return self.config().is_causal

    @property
    def heads(self) -> dict[str, type]:
        """Auto class name → model class, for every head this configuration can have."""
        prefix = self.config_class.__name__.removesuffix("Config")
        other = "MaskedLM" if self.is_causal else "CausalLM"
        classes = {head: getattr(hea, f"{prefix}For{head}", None) for head in HEADS if head != other}
        found = {f"AutoModelFor{head}": cls for head, cls in classes.items() if cls is not None}
        return {"AutoModel": getattr(hea, f"{prefix}Model"), **found}

    @property
    def main_head(self) -> str:
        """A language model, where the family has one of this direction; else a classifier."""
        wanted = "AutoModelForCausalLM" if self.is_causal else "AutoModelForMaskedLM"
        return wanted if wanted in self.heads else "AutoModelForSequenceClassification"

    def model(self, auto_class: str | None = None, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
        """Return a model in eval mode whose every parameter is random, so that no special start value hides a bug."""
        name = auto_class or self.main_head
        torch.manual_seed(seed)
        model = self.heads[name](self.config(**changes)).eval()
        return randomize(model, seed)

    def inputs(self, auto_class: str | None = None) -> dict[str, torch.Tensor]:
        """Return inputs with labels for one head; see `head_inputs`."""
        return head_inputs(auto_class or self.main_head)


def randomize(model: torch.nn.Module, seed: int = 0) -> Any:
    """Move every parameter away from its start value, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim < 2 else 0.15
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    for spans in span_modules(model):
        spans.clamp_()
    return model


def parametrize_cases(metafunc: Any, cases: Sequence[Any]) -> None:
    """Give a test that asks for `case` every case, and one that asks for `auto_class`, too, each of its heads.

    One that asks for `traced_case` gets those that are compiled and exported.
    """
    if "traced_case" in metafunc.fixturenames:
        traced = [case for case in cases if case.is_traced]
        metafunc.parametrize("traced_case", traced, ids=[case.name for case in traced])
    if "auto_class" in metafunc.fixturenames:
        pairs = [(case, name) for case in cases for name in case.heads]
        ids = [f"{case.name}-{name.removeprefix('AutoModel') or 'Base'}" for case, name in pairs]
        metafunc.parametrize(("case", "auto_class"), pairs, ids=ids)
    elif "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


def switch_off_dropout(model: torch.nn.Module) -> None:
    """Set every dropout to 0, as TRL's `disable_dropout` does."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def checkpoint_activations(model: Any, *arguments: Any) -> None:
    """Switch gradient checkpointing on, which transformers 5.16 knew by an older name."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(*arguments)


def simplified(name: str, shows_a_route: bool = False, **fields: Any) -> Case:
    return Case(f"simplified-{name}", hea.SimplifiedTransformerConfig, tuple(fields.items()), shows_a_route)


def sparse(name: str, preset: str, shows_a_route: bool = False, **fields: Any) -> Case:
    """Return a case of a preset; `fields` are the preset's own arguments and fields of the config."""
    fields = {**dict.fromkeys(("embedding_dropout", "hidden_dropout", "attention_dropout"), 0.0), **fields}
    return Case(f"sparse-{name}", hea.SparseTransformerConfig, tuple(fields.items()), shows_a_route, preset)


def span(name: str, preset: str = "enwik8_demo", shows_a_route: bool = False, **fields: Any) -> Case:
    """Return a case of adaptive span, whose limit and ramp are short enough to matter."""
    fields = {"span_limit": 9, "span_ramp": 3, **fields}
    return Case(f"span-{name}", hea.AdaptiveSpanConfig, tuple(fields.items()), shows_a_route, preset)


def reformer(name: str, **fields: Any) -> Case:
    """Return a case of the Reformer, whose chunks are short enough to matter; its rotations never change."""
    chunks = {"lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4, "num_buckets": 4}
    fields = {"attn_layers": ["local", "lsh"], "hash_seed": 1, **chunks, **fields}
    return Case(f"reformer-{name}", hea.EfficientReformerConfig, tuple(fields.items()), shows_a_route=True)


def routing(name: str, shows_a_route: bool = False, **fields: Any) -> Case:
    """Return a case of routing heads whose clusters are short enough to matter."""
    fields = {"num_routing_heads": 2, "num_clusters": 3, "cluster_tokens": 4, **fields}
    return Case(f"routing-{name}", hea.RoutingTransformerConfig, tuple(fields.items()), shows_a_route)


CASES = [
    simplified("pre_ln", shows_a_route=True, block="pre_ln", num_key_value_heads=2, position_embedding_type="rope"),
    simplified("parallel", block="parallel", position_embedding_type="alibi"),
    simplified("v_skipinit", block="v_skipinit"),
    simplified("sas", shows_a_route=True, block="sas", position_embedding_type="rope"),
    simplified("sas_p", block="sas_p", position_embedding_type="learned"),
    simplified("sas_p_no_norm", block="sas_p_no_norm"),
    simplified(
        "sas_p-alibi",
        shows_a_route=True,
        block="sas_p",
        position_embedding_type="alibi",
        gated_mlp=True,
        hidden_act="gelu",
    ),
    simplified("sas-orthogonal", block="sas", matrix_init="orthogonal", value_gain=0.5, projection_gain=0.5),
    simplified("pre_ln-masked", block="pre_ln", is_causal=False, norm_type="layernorm"),
    simplified("sas-masked", block="sas", is_causal=False, position_embedding_type="rope"),
    simplified(
        "sas_p-masked", shows_a_route=True, block="sas_p", is_causal=False, position_embedding_type="scaled_sinusoidal"
    ),
    sparse("longformer", "longformer", shows_a_route=True, attention_window=[4, 8], pad_token_id=0, sep_token_id=2),
    sparse("longformer-first", "longformer", attention_window=6, global_tokens="first", attention_dilation=[1, 2]),
    sparse("longformer-causal", "longformer", attention_window=6, is_causal=True, global_tokens="first"),
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
    sparse("bigbird-causal", "bigbird_itc", shows_a_route=True, block_tokens=2, num_random_blocks=1, is_causal=True),
    sparse("char_lm", "longformer_char_lm"),
    sparse("sliding-pre", "sliding", left=3, norm_position="pre", position_embedding_type="sinusoidal"),
    sparse("sliding-grouped", "sliding", left=3, is_causal=True, num_key_value_heads=2, norm_type="rmsnorm"),
    sparse("block_local", "block_local", block_tokens=4, gated_mlp=True, type_vocab_size=2),
    sparse("strided", "strided", stride=3),
    span("adaptive"),
    span("fixed", span="fixed"),
    span("dynamic", span="dynamic"),
    span("modern", "modern", shows_a_route=True),
    span("modern-dynamic", "modern", span="dynamic"),
    span("modern-frozen", "modern", span_penalty=0.0, frozen_spans=[[0.0, 2.5, 9.0, 4.0], [1.0, 1.0, 7.2, 0.0]]),
    span("encoder", "modern", is_causal=False),
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
    simplified("sas-span", block="sas", position_embedding_type="rope", span="adaptive", span_limit=9, span_ramp=3),
    simplified("sas_p-span", block="sas_p", span="dynamic", span_limit=9, span_ramp=3),
    simplified("sas_p-masked-span", block="sas_p", is_causal=False, span="adaptive", span_limit=9, span_ramp=3),
    reformer("causal", is_causal=True, chunk_by_bucket=True),
    reformer("masked", num_hashes=2, local_wraps=True),
]


# forward, with masks and without, and backward they run no line of code that no other case runs, so that a compiler
# meets nothing new in them
CODE_OF_OTHERS = (
    "simplified-parallel",
    "simplified-v_skipinit",
    "simplified-sas",
    "simplified-sas_p",
    "simplified-sas_p_no_norm",
    "simplified-pre_ln-masked",
    "simplified-sas_p-masked",
    "sparse-longformer",
    "sparse-longformer-causal",
    "sparse-sliding-grouped",
    "span-adaptive",
    "span-modern",
    "span-modern-dynamic",
    "span-encoder",
    "simplified-sas_p-span",
    "simplified-sas_p-masked-span",
)


def random_ids(rows: int, tokens: int, seed: int = 2) -> torch.Tensor:
    """Return tokens that are none of the special ones."""
    return torch.randint(3, TINY["vocab_size"], (rows, tokens), generator=torch.Generator().manual_seed(seed))


def head_inputs(auto_class: str, rows: int = 3, tokens: int = 12) -> dict[str, torch.Tensor]:
    """Return inputs with labels for one head: random tokens, the first row padded on the right."""
    generator = torch.Generator().manual_seed(1)
    shape = (rows, 2, tokens) if auto_class.endswith("MultipleChoice") else (rows, tokens)
    ids = torch.randint(3, TINY["vocab_size"], shape, generator=generator)
    ids[..., 4] = TINY["eos_token_id"]  # ends the question, where there is one
    mask = torch.ones_like(ids)
    mask[0, ..., -4:] = 0
    inputs = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    labels: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "AutoModel": dict,
        "AutoModelForCausalLM": lambda: {"labels": ids.masked_fill(mask == 0, -100)},
        "AutoModelForMaskedLM": lambda: {"labels": ids.masked_fill(mask == 0, -100)},
        "AutoModelForMultipleChoice": lambda: {"labels": torch.ones(rows, dtype=torch.long)},
        "AutoModelForQuestionAnswering": lambda: {
            "start_positions": torch.ones(rows, dtype=torch.long),
            "end_positions": torch.full((rows,), 3),
        },
        "AutoModelForSequenceClassification": lambda: {"labels": torch.ones(rows, dtype=torch.long)},
        "AutoModelForTokenClassification": lambda: {"labels": (ids % 2).masked_fill(mask == 0, -100)},
    }
    return {**inputs, **labels[auto_class]()}


def first_tensor(output: Any) -> torch.Tensor:
    """Return the main output of any head."""
    return next(output[name] for name in ("logits", "start_logits", "last_hidden_state") if name in output)


def scalar(output: Any) -> torch.Tensor:
    """Return what a gradient can be asked of: the loss, or the sum of what there is."""
    return output["loss"] if "loss" in output else first_tensor(output).sum()
