"""Simplified Transformer: Pre-LN, parallel, V-SkipInit, SAS, SAS-P and norm-free SAS-P in one family.

With U = Norm(X), head h of shaped attention returns (α_h·I + β_h·A_h − γ_h·C)·V_h, where A is the softmax matrix, C its
value at zero logits and V_h head h's slice of U·W^V. SAS drops W^V (except in the first layer), W^P and the attention
skip; SAS-P also computes the MLP in parallel to attention and drops the last skip. The matrix is never formed: α·V +
β·A·V − γ·C·V is an attention function of transformers plus a running mean (`centering.py`).

Source: He & Hofmann, "Simplifying Transformer Blocks" (arXiv:2311.01906), equations 1-7, 12 and 13. Where the text is
silent, this follows the authors' code: W^Q starts at 0, W^V of layer 1 is kept, norm-free SAS-P keeps a norm before
block 1 and after the last. Where we differ: C is renormalised under padding and packing, and under an
`attention_pattern` it averages over the keys that A attends to; attention dropout acts on the softmax weights A alone
(theirs on the whole shaped matrix); RMSNorm adds its epsilon under the root.
"""

from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.attention.sharded.shards import shards_of
from hf_efficient_attn.attention.sharded.ulysses import ulysses_heads
from hf_efficient_attn.errors import CheckpointError, UnsupportedBackendError
from hf_efficient_attn.integration.forward_context import append_paged, is_paged
from hf_efficient_attn.integration.layer_patterns import NAME
from hf_efficient_attn.integration.model_info import refuse_overridden
from hf_efficient_attn.integration.trial import MATRIX_TRIAL, TRIAL
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.base import BACKEND_OF_IMPLEMENTATION, FamilyPreTrainedModel, saved_config
from hf_efficient_attn.models.config.fields import own_fields
from hf_efficient_attn.models.heads.outputs import BackboneOutput
from hf_efficient_attn.models.heads.task_heads import (
    CausalLMHead,
    MaskedLMHead,
    MultipleChoiceHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from hf_efficient_attn.models.parts.attention import MultiHeadAttention
from hf_efficient_attn.models.parts.blocks import MLP, InitializedLinear, build_norm, drop_rate, eager_attention_forward
from hf_efficient_attn.models.parts.embeddings import Positions, rotate_both
from hf_efficient_attn.models.prologue import backbone_forward
from hf_efficient_attn.models.spans.attention import span_inputs
from hf_efficient_attn.models.spans.memory import SpanGeneration
from hf_efficient_attn.models.spans.module import all_bounds
from hf_efficient_attn.models.spans.training import SpanCheckpoints, span_penalty

from .centering import Centering, MaskGeneration, append_and_sum, block_masks, mean_of_read, merge_heads, reads_selected
from .configuration_simplified_transformer import SimplifiedTransformerConfig
from .spanned_attention import SpannedAttention

# Gains, and the value and projection matrices W^V and W^P: plain, reparameterised, or absent.
#
# Source: He & Hofmann (arXiv:2311.01906), equation 6 and appendix C. The authors keep W_init outside the state dict,
# so their models with orthogonal W_init cannot be reloaded; here it is a persistent buffer.


class Gain(nn.Module):
    """Multiply by one number, or by one number per head: a parameter if trained, otherwise a constant.

    Shapes: with `num_heads` [..., H, D] → the same; without, any shape → the same.
    """

    def __init__(self, config: SimplifiedTransformerConfig, name: str, layer_idx: int, num_heads: int = 1) -> None:
        super().__init__()
        self.value = config.gain(name, layer_idx)
        self.gain = nn.Parameter(torch.full((num_heads,), float(self.value))) if config.is_trainable(name) else None

    @property
    def is_zero(self) -> bool:
        """Whether this is the constant 0, so that the term it scales can be left out."""
        return self.gain is None and self.value == 0

    def initialize(self) -> None:
        if self.gain is not None:
            init.constant_(self.gain, self.value)

    def forward(self, x: torch.Tensor, onto: torch.Tensor | None = None, sign: int = 1) -> torch.Tensor:
        """Return gain·x, or onto + sign·gain·x in one pass (`onto` itself if the gain is the constant 0)."""
        if self.gain is None:
            if onto is not None:
                return onto if self.is_zero else torch.add(onto, x, alpha=sign * self.value)
            return x if self.value == 1 else x * self.value
        gain = self.gain.to(x.dtype)
        gain = gain if len(gain) == 1 else gain.unsqueeze(-1)
        return x * gain if onto is None else torch.addcmul(onto, x, gain, value=sign)

    def extra_repr(self) -> str:
        return f"{self.value}, trainable={self.gain is not None}"


class ReparameterizedLinear(nn.Module):
    """Return x·(a·W_init + b·ΔW) with W_init fixed (identity or orthogonal) and ΔW = 0 at the start.

    ΔW exists only if b does not start at 0. Shapes: [..., hidden_size] → [..., hidden_size].
    """

    def __init__(self, config: SimplifiedTransformerConfig, layer_idx: int, matrix: str) -> None:
        super().__init__()
        self.config, self.layer_idx, self.matrix = config, layer_idx, matrix
        size = config.hidden_size
        self.skip_gain = Gain(config, f"{matrix}_skip_gain", layer_idx)
        self.is_identity = config.resolved_matrix_init == "identity"
        if not self.is_identity:
            self.register_buffer("initial_weight", torch.empty(size, size))
        self.weight = None
        if config.gain(f"{matrix}_gain", layer_idx) != 0:
            self.weight = nn.Parameter(torch.zeros(size, size))
            self.update_gain = Gain(config, f"{matrix}_gain", layer_idx)
        self.bias = (
            nn.Parameter(torch.zeros(size)) if config.attention_bias == "all" and self.weight is not None else None
        )

    def initialize(self) -> None:
        if self.weight is not None:
            init.zeros_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)
        if not self.is_identity:
            init.copy_(self.initial_weight, initial_matrix(self.config, self.layer_idx, self.matrix))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_identity:
            out = self.skip_gain(x)
            if self.weight is None:
                return out
            return out + nn.functional.linear(x, self.update_gain(self.weight), self.bias)
        return nn.functional.linear(x, self.effective_weight(), self.bias)

    def effective_weight(self) -> torch.Tensor:
        """Return a·W_init + b·ΔW as `nn.Linear` would hold it. Shape [hidden_size, hidden_size]."""
        size = self.config.hidden_size
        device = next((tensor.device for tensor in [*self.parameters(), *self.buffers()]), None)
        initial = torch.eye(size, device=device) if self.is_identity else self.initial_weight
        weight = self.skip_gain(initial)
        return weight if self.weight is None else weight + self.update_gain(self.weight)


class SquareLinear(nn.Linear):
    """A plain W^V or W^P of `hidden_size`² that starts orthogonal or as the identity."""

    def __init__(self, config: SimplifiedTransformerConfig, layer_idx: int, matrix: str) -> None:
        super().__init__(config.hidden_size, config.hidden_size, bias=config.attention_bias == "all")
        self.config, self.layer_idx, self.matrix = config, layer_idx, matrix

    def initialize(self) -> None:
        init.copy_(self.weight, initial_matrix(self.config, self.layer_idx, self.matrix))


def build_projection(config: SimplifiedTransformerConfig, layer_idx: int, matrix: str) -> nn.Module | None:
    """Return the module that applies W^V (`matrix="value"`) or W^P (`"projection"`), or None for the identity."""
    if config.is_identity(layer_idx, matrix):
        return None
    if config.is_reparameterized:
        return ReparameterizedLinear(config, layer_idx, matrix)
    if config.resolved_matrix_init != "normal":
        return SquareLinear(config, layer_idx, matrix)
    size, std = config.hidden_size, config.matrix_init_std
    if matrix == "value":
        size = config.head_dim * config.key_value_heads
    elif config.projection_init_std is not None:
        std = config.projection_init_std
    return InitializedLinear(config.hidden_size, size, bias=config.attention_bias == "all", std=std)


def initial_matrix(config: SimplifiedTransformerConfig, layer_idx: int, matrix: str) -> torch.Tensor:
    """Return W_init of one matrix, in `nn.Linear`'s orientation: a pure function of the config.

    Shape [hidden_size, hidden_size], float32, on the CPU. The tie `last_layer` recomputes all layers' matrices.
    """
    if config.resolved_matrix_init == "identity":
        return torch.eye(config.hidden_size, device="cpu")
    last = config.num_hidden_layers - 1
    if matrix == "projection" and config.matrix_init_tie == "all_layers":
        return _orthogonal(config, layer_idx, "value").T.contiguous()
    if matrix == "projection" and config.matrix_init_tie == "last_layer" and layer_idx == last:
        product = torch.eye(config.hidden_size, dtype=torch.float64, device="cpu")
        for layer in range(config.num_hidden_layers):
            product = _orthogonal(config, layer, "value").double() @ product
            if layer < last:
                product = _orthogonal(config, layer, "projection").double() @ product
        return product.T.float().contiguous()
    return _orthogonal(config, layer_idx, matrix)


def _orthogonal(config: SimplifiedTransformerConfig, layer_idx: int, matrix: str) -> torch.Tensor:
    seed = (config.matrix_seed * config.num_hidden_layers + layer_idx) * 2 + (matrix == "projection")
    generator = torch.Generator("cpu").manual_seed(seed)
    size = config.hidden_size
    normal = torch.randn(size, size, generator=generator, dtype=torch.float64, device="cpu")
    q, r = torch.linalg.qr(normal)
    return (q * r.diagonal().sign()).float()


# Plain and shaped attention of simplified blocks: α·I + β·A − γ·C, where A is softmax attention.


class SimplifiedTransformerAttention(MultiHeadAttention):
    """Plain or shaped multi-head attention. [B, T, hidden_size] → the same, the weights A or None, the mean span."""

    # the implementations that attend to the keys that an indexer (`index`) selects
    index_implementations = (NAME,)

    def __init__(self, config: SimplifiedTransformerConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_key_value_groups = config.num_attention_heads // config.key_value_heads
        bias = config.attention_bias != "none"
        key_width = config.key_value_heads * self.head_dim
        query_std = config.query_init_std
        if query_std is None:
            query_std = 0.0 if config.is_shaped else config.initializer_range
        self.q_proj = InitializedLinear(config.hidden_size, config.hidden_size, bias, query_std)
        self.k_proj = InitializedLinear(config.hidden_size, key_width, bias, config.key_init_std)
        self.v_proj = build_projection(config, layer_idx, "value")
        self.o_proj = build_projection(config, layer_idx, "projection")
        self.spanned = None if config.span is None else SpannedAttention(config, layer_idx)
        self.has_head_gains = config.has_head_gains
        if self.has_head_gains:
            num_gains = config.num_attention_heads if config.per_head_gains else 1
            self.identity_gain = Gain(config, "identity_gain", layer_idx, num_gains)
            self.softmax_gain = Gain(config, "softmax_gain", layer_idx, num_gains)
            self.centering_gain = Gain(config, "centering_gain", layer_idx, num_gains)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        centering: Centering | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        query, key = self.q_proj(hidden_states), self.k_proj(hidden_states)
        values = hidden_states if self.v_proj is None else self.v_proj(hidden_states)
        query, key, value = (self.heads(each) for each in (query, key, values))
        if position_embeddings is not None:
            query, key = rotate_both(query, key, *position_embeddings)

        is_of_read = centering is not None and reads_selected(self)
        if is_of_read:
            # C over all tokens, which `mean_of_read` replaces
            centering = None
        past_sum = 0.0
        if is_paged(cache):
            key, value = append_paged(cache, key, value, self.layer_idx, kwargs)
        elif cache is not None:
            key, value, past_sum = append_and_sum(cache, key, value, self.layer_idx, centering, values)

        centre, span = None, None
        if self.spanned is not None:
            out, weights, centre, span = self.spanned(hidden_states, query, key, value, **kwargs)
        else:
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
            dropout = drop_rate(self.dropout)
            out, weights = attention(
                self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
            )
        if is_of_read:
            centre = mean_of_read(self, query, key, value, attention_mask, **kwargs)
        if centering is not None:
            centre = self._centre(centering, value, values, past_sum)
        return self._shaped(out, values, centre), weights, span

    def _shaped(self, out: torch.Tensor, values: torch.Tensor, centre: torch.Tensor | None) -> torch.Tensor:
        """Return (α·V + β·A·V − γ·C·V)·W^P, [B, T, hidden_size].

        Shapes: out = A·V [B, T, H, D], values = V [B, T, width of V], centre = C·V [B, T or 1, H, D] or None.
        """
        heads = (*values.shape[:-1], -1, self.head_dim)
        if self.has_head_gains:
            out = self.identity_gain(values.view(heads), onto=self.softmax_gain(out.view(heads)))
        if centre is not None:
            out = self.centering_gain(centre, onto=out, sign=-1)
        out = out.reshape(*values.shape[:-1], -1)
        return out if self.o_proj is None else self.o_proj(out)

    def _centre(
        self, centering: Centering, value: torch.Tensor, values: torch.Tensor, past_sum: torch.Tensor | float
    ) -> torch.Tensor:
        """Return C·V, [B, T or 1, H, D]."""
        shards = shards_of(self)
        if shards is None or centering.shared_tokens is None:
            mean = centering.mean(merge_heads(value) if centering.matrix is not None else values, past_sum)
            return mean.unflatten(-1, (-1, self.head_dim))
        ulysses = ulysses_heads(shards, value.shape[1], centering.shared_tokens)
        mean = centering.mean(merge_heads(ulysses.gather_sequences(value))).unflatten(-1, (-1, self.head_dim))
        return ulysses.own_rows(mean.expand(-1, centering.shared_tokens, -1, -1))


# What the family refuses: foreign checkpoints, and attention implementations that would compute something else.


# the implementations that add the bias of ALiBi to scores, trials included
WITH_BIAS = ("eager", "sdpa", "flex_attention", NAME, TRIAL, MATRIX_TRIAL)


class BlockChecks:
    """Mixin that refuses weights and implementations with which a model would not compute what its config says."""

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Resolve the implementation as transformers does, but refuse one that would compute something else."""
        implementation = super().get_correct_attn_implementation(requested_attention, is_init_check)
        check_implementation(self.config, implementation)
        return implementation

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as `PreTrainedModel.from_pretrained` does, but refuse the weights of another block or family."""
        check_checkpoint(cls, pretrained_model_name_or_path, kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)


def check_checkpoint(model_class: type, path: Any, kwargs: dict[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint at `path` was written by another block or another family.

    `kwargs` are those of `from_pretrained`: its `config` or single fields say what is wanted.
    """
    saved = saved_config(path, kwargs)
    if not saved:
        return  # there is no config: an adapter, or nothing at all, which from_pretrained reports itself
    config_class = model_class.config_class
    if saved.get("model_type", config_class.model_type) != config_class.model_type:
        raise CheckpointError(
            f"{path} holds a {shown(saved['model_type'])} model; {model_class.__name__} cannot load it. Simplified "
            "blocks have no counterpart for its skips and projections: train from scratch."
        )
    wanted = kwargs.get("config")
    if not hasattr(type(wanted), "structure"):
        wanted = config_class(**{**_own_fields(config_class, saved), **_own_fields(config_class, kwargs)})
    wanted.check()
    before, after = config_class(**_own_fields(config_class, saved)).structure, wanted.structure
    changed = [name for name in before if before[name] != after[name]]
    if before["block"] != after["block"]:
        changed = changed[:1]  # the rest follows from it
    if changed:
        raise CheckpointError(
            f"{path} was saved with {', '.join(f'{name}={shown(before[name])}' for name in changed)}, but "
            f"{', '.join(f'{name}={shown(after[name])}' for name in changed)} was requested: the weights would not "
            "fit, and missing ones would be random. Load it as it was saved, or train from scratch."
        )


def _own_fields(config_class: type, values: dict[str, Any]) -> dict[str, Any]:
    known = own_fields(config_class)
    return {name: value for name, value in values.items() if name in known}


def check_implementation(config: SimplifiedTransformerConfig, implementation: str | None, paged: bool = False) -> None:
    """Raise UnsupportedBackendError if `implementation` would not compute what the config describes.

    `paged`: whether the call comes from continuous batching, which gives attention a paged cache of keys and values.
    """
    name = implementation or "eager"
    if config.span is not None and (paged or (name not in BACKEND_OF_IMPLEMENTATION)):
        raise UnsupportedBackendError(
            f"attn_implementation={shown(name)}{' with a paged cache' if paged else ''} would drop the attention "
            f"pattern of span={shown(config.span)}. Use generate() with one of: {', '.join(BACKEND_OF_IMPLEMENTATION)}."
        )
    if config.is_centered and (paged or name in ("vllm", "sglang") or name.startswith("paged|")):
        raise UnsupportedBackendError(
            f"attn_implementation={shown(name)} keeps its own paged cache of keys and values, but "
            f"block={shown(config.block)} also needs the running mean of the values. Use generate() with 'sdpa', "
            "'eager' or 'flex_attention'; block='pre_ln' and 'parallel' can be served."
        )
    if config.position_embedding_type == "alibi" and (paged or name not in WITH_BIAS):
        raise UnsupportedBackendError(
            f"attn_implementation={shown(name)}{' with a paged cache' if paged else ''} would drop the ALiBi bias. "
            "Use generate() with 'sdpa', 'eager' or 'flex_attention'."
        )


class SimplifiedTransformerLayer(GradientCheckpointingLayer):
    """One block, sequential or parallel, with the skips its config asks for. [B, T, hidden_size] → same, mean span.

    `block="sas_p"`, with U = Norm(X): Y = β_SA · SMHA(U) + β_FF · MLP(U), without a skip. SMHA concatenates the heads
    α·V + β·softmax(Q Kᵀ / √d)·V − γ·C·V, where V is the head's slice of U, because there is no W^P and no W^V (except
    in layer 0), and C·V is the mean of the values over the allowed keys. At the start α = β = γ = 1 and W^Q = 0, so
    that the softmax equals C and SMHA(U) = V, which is U except in layer 0; β_SA = 1 and β_FF is about
    0.1 · √(18 / layers). `gains.py` has the gains of every block and their initial values.
    """

    def __init__(self, config: SimplifiedTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.is_parallel, is_normalized = config.style.parallel, config.style.normalized
        self.input_layernorm = build_norm(config) if is_normalized or layer_idx == 0 else nn.Identity()
        self.self_attn = SimplifiedTransformerAttention(config, layer_idx)
        self.mlp = MLP(config, config.gated_mlp, config.mlp_output_init_std)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.attention_gain = Gain(config, "attention_gain", layer_idx)
        self.mlp_gain = Gain(config, "mlp_gain", layer_idx)
        if self.is_parallel:
            self.combined_skip_gain = Gain(config, "combined_skip_gain", layer_idx)
        else:
            self.attention_skip_gain = Gain(config, "attention_skip_gain", layer_idx)
            self.mlp_skip_gain = Gain(config, "mlp_skip_gain", layer_idx)
            self.post_attention_layernorm = build_norm(config) if is_normalized else nn.Identity()

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed = self.input_layernorm(hidden_states)
        attended, _, span = self.self_attn(normed, **kwargs)
        attended = self.attention_gain(self.dropout(attended))
        if self.is_parallel:
            out = self.mlp_gain(self.dropout(self.mlp(normed)), onto=attended)
            return self.combined_skip_gain(hidden_states, onto=out), span
        hidden_states = self.attention_skip_gain(hidden_states, onto=attended)
        out = self.mlp_gain(self.dropout(self.mlp(self.post_attention_layernorm(hidden_states))))
        return self.mlp_skip_gain(hidden_states, onto=out), span


class SimplifiedTransformerPreTrainedModel(SpanCheckpoints, BlockChecks, FamilyPreTrainedModel):
    """Weight initialisation, loading checks and capabilities shared by the backbone and its heads."""

    config_class = SimplifiedTransformerConfig
    config: SimplifiedTransformerConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "simplified-transformer", "hf_efficient_attn"]
    _no_split_modules = ["SimplifiedTransformerLayer"]
    _supports_flash_attn = True
    _supports_attention_backend = True
    takes_paged_cache = True
    _can_record_outputs = {"hidden_states": SimplifiedTransformerLayer, "attentions": SimplifiedTransformerAttention}

    def __init__(self, config: SimplifiedTransformerConfig) -> None:
        super().__init__(config)
        if config.span is not None:
            self._keep_in_fp32_modules_strict = {"spans"}

    def check_call(self, cache: Cache | None) -> None:
        """Raise UnsupportedBackendError for an attention function of transformers that the model cannot use."""
        implementation = self.config._attn_implementation
        check_implementation(self.config, implementation, paged=is_paged(cache))
        refuse_overridden(implementation, f"block='{self.config.block}'")


class SimplifiedTransformerModel(SimplifiedTransformerPreTrainedModel):
    """The backbone: embedding, positions, blocks, final norm. Shapes: input_ids [B, T] → [B, T, hidden_size]."""

    def __init__(self, config: SimplifiedTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.positions = Positions(config)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(SimplifiedTransformerLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = build_norm(config, kind=config.final_norm_type)
        self.gradient_checkpointing = False
        self.post_init()

    @backbone_forward
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BackboneOutput:
        """Return the last hidden state, the cache with `use_cache`, and in training the spans' `auxiliary_loss`.

        For the arguments see `prepare`.
        """
        modules = [] if self.config.span is None else [layer.self_attn.spanned.spans for layer in self.layers]
        bounds = all_bounds(self, modules, attention_mask, position_ids)
        call = self.prepare(input_ids, attention_mask, position_ids, inputs_embeds, kwargs, cache, use_cache)
        hidden_states, where = self.positions(call.embedded, call)
        if self.config.span is None:
            where |= block_masks(self.config, call, shards_of(self) is not None)
        else:
            where["inputs"] = span_inputs(call, self, bounds)
        if call.position_ids is not None:
            # flash attention finds packed documents from these
            where["position_ids"] = call.position_ids
        kwargs = {**kwargs, **where, "cache": cache if is_paged(cache) else call.cache}
        hidden_states, spans = self.dropout(hidden_states), []
        for layer in islice(self.layers, self.config.num_hidden_layers):
            hidden_states, span = layer(hidden_states, **kwargs)
            spans.append(span)
        states = self.norm(hidden_states)
        return BackboneOutput(states, call.cache, auxiliary_loss=span_penalty(self, spans, states))


class SimplifiedTransformerForCausalLM(
    SpanGeneration, MaskGeneration, CausalLMHead, SimplifiedTransformerPreTrainedModel, GenerationMixin
):
    backbone_class = SimplifiedTransformerModel


class SimplifiedTransformerForMaskedLM(MaskedLMHead, SimplifiedTransformerPreTrainedModel):
    backbone_class = SimplifiedTransformerModel


class SimplifiedTransformerForSequenceClassification(SequenceClassificationHead, SimplifiedTransformerPreTrainedModel):
    backbone_class = SimplifiedTransformerModel


class SimplifiedTransformerForTokenClassification(TokenClassificationHead, SimplifiedTransformerPreTrainedModel):
    backbone_class = SimplifiedTransformerModel


class SimplifiedTransformerForQuestionAnswering(QuestionAnsweringHead, SimplifiedTransformerPreTrainedModel):
    backbone_class = SimplifiedTransformerModel


class SimplifiedTransformerForMultipleChoice(MultipleChoiceHead, SimplifiedTransformerPreTrainedModel):
    backbone_class = SimplifiedTransformerModel


__all__ = [
    "SimplifiedTransformerForCausalLM",
    "SimplifiedTransformerForMaskedLM",
    "SimplifiedTransformerForMultipleChoice",
    "SimplifiedTransformerForQuestionAnswering",
    "SimplifiedTransformerForSequenceClassification",
    "SimplifiedTransformerForTokenClassification",
    "SimplifiedTransformerModel",
    "SimplifiedTransformerPreTrainedModel",
]
