"""What training needs of memory: for each parameter, and for each token in each layer.

The formula counts what autograd keeps for the backward pass. With d = `hidden_size`, f = `intermediate_size`, q and k =
the widths of all heads and of all key heads together and H = `num_attention_heads`, a pre-norm block with LayerNorm
keeps of every token 4·d numbers around its two norms, q + 2·k + q in attention (queries, keys, values, outputs) and 2·f
in the MLP (around its activation), in the dtype of the model, and H numbers in float32 (log-sum-exps). None of it
depends on the length: a pattern keeps what full attention in a fused kernel keeps. (Texts so short that attention is
dense keep its mask, too.)

These are the tensors that torch keeps on CPUs; a fused norm or activation on GPUs keeps at most as many.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns.checks import check_length

# decoders of transformers whose blocks are those of Llama
LIKE_LLAMA = ("llama", "mistral", "qwen2")
# and families of this package that are counted
FAMILIES = ("simplified_transformer", "sparse_transformer", "adaptive_span")
GIBIBYTE = 2**30
FLOAT32 = 4
# numbers that the running mean of shaped attention keeps of a token, in float32
RUNNING_MEAN = 18.0625


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that one process holds when the backward pass begins; it prints as a small table.

    Attributes:
        weights, gradients, optimizer: of its share of the parameters.
        activations: what autograd keeps of all layers.
        recomputed: with activation checkpointing, what it keeps of the one layer that is computed again.
        head: what it keeps of the last norm, the output layer and the loss; log-probabilities are float32.
        per_token: `activations` and `head` of one token.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int
    head: int
    per_token: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.recomputed + self.head

    def __str__(self) -> str:
        parts = ("weights", "gradients", "optimizer", "activations", "recomputed", "head", "total")
        rows = [f"{part:<12}{getattr(self, part) / GIBIBYTE:10.3f} GiB" for part in parts]
        return "\n".join([*rows, f"{'per token':<12}{self.per_token / 1024:10.3f} KiB"])


def training_memory(
    model: PreTrainedModel,
    tokens: int,
    activation_checkpointing: bool = False,
    optimizer_states: int = 2,
    processes: int = 1,
) -> TrainingMemory:
    """Return what a step of training needs of memory in each process, all in the dtype of the model.

    A model on the meta device costs nothing to ask:

    >>> import torch
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> with torch.device("meta"):
    ...     model = AutoModelForCausalLM.from_config(LlamaConfig(), dtype=torch.bfloat16)
    >>> print(training_memory(model, tokens=8192, activation_checkpointing=True, processes=8))
    weights          1.569 GiB
    gradients        1.569 GiB
    optimizer        3.138 GiB
    activations      2.000 GiB
    recomputed       1.423 GiB
    head             1.227 GiB
    total           10.925 GiB
    per token      413.004 KiB

    Temporary tensors and what the allocator wastes come on top, the gradients of the logits above all; under FSDP, too,
    the gathered weights of two layers. Dropout is not counted. Autocast (`bf16=True` of Trainer) keeps 10 to 30 percent
    more activations than weights in bfloat16, beside weights, gradients and optimizer in float32.

    Args:
        tokens: of the batch of one process.
        activation_checkpointing: keep the input of each layer alone, and compute it again.
        optimizer_states: numbers that the optimizer keeps for each parameter: 2 for AdamW, 1 for SGD with momentum.
        processes: among which weights, gradients and optimizer are divided (FSDP, ZeRO-3).

    Raises:
        ConfigurationError: no model of transformers; nothing is known about the blocks of this model.
        InputError: a number that is no positive integer.
    """
    if not isinstance(model, nn.Module) or not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise ConfigurationError(
            f"training_memory takes a model of transformers, not {type(model).__name__}. Of a config, make one that "
            "holds no memory: with torch.device('meta'): model = AutoModelForCausalLM.from_config(config)."
        )
    for name, number in {"tokens": tokens, "processes": processes}.items():
        check_length(name, number)
    config: Any = model.config
    size = model.dtype.itemsize
    parameters = sum(each.numel() * each.element_size() for each in model.parameters())
    trained = sum(each.numel() * each.element_size() for each in model.parameters() if each.requires_grad)
    layers = [block_bytes(config, layer, size) for layer in range(config.num_hidden_layers)]
    kept = len(layers) * size * config.hidden_size if activation_checkpointing else sum(layers)
    head = head_bytes(model, size)
    return TrainingMemory(
        weights=-(-parameters // processes),
        gradients=-(-trained // processes),
        optimizer=-(-trained * optimizer_states // processes),
        activations=round(tokens * kept),
        recomputed=round(tokens * max(layers)) if activation_checkpointing else 0,
        head=tokens * head,
        per_token=round(kept) + head,
    )


def block_bytes(config: Any, layer: int, size: int) -> float:
    """Return the bytes that autograd keeps of a token in one block.

    size: bytes of a number in the dtype of the model.

    Raises:
        ConfigurationError: nothing is known about this block.
    """
    check_known(config)
    is_llama = config.model_type in LIKE_LLAMA
    style = getattr(config, "style", None)
    num_norms = 2 if style is None else style.normalized * (1 if style.parallel else 2)
    norms = num_norms * norm_bytes(config, "rmsnorm", size) if num_norms else size * config.hidden_size
    in_mlp = (1 if config.hidden_act == "relu" else 2) + 2 * (is_llama or config.gated_mlp)
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    in_attention = 2 * (config.num_attention_heads + key_heads) * head_width(config)
    numbers = in_attention + in_mlp * config.intermediate_size
    kept = norms + size * numbers + FLOAT32 * config.num_attention_heads
    if getattr(config, "span", None) == "dynamic":
        # the spans, and in lower precision what they are computed from
        kept += FLOAT32 * (2 * config.num_attention_heads + (config.hidden_size if size < FLOAT32 else 0))
    return kept + (shaped_bytes(config, layer, size) if getattr(config, "is_shaped", False) else 0)


def check_known(config: Any) -> None:
    """Raise ConfigurationError unless `block_bytes` counts what this model's blocks keep."""
    is_simplified = getattr(config, "style", None) is not None
    has_more = (
        config.is_encoder_decoder
        or getattr(config, "global_projections", False)
        or getattr(config, "position_embedding_type", None) in ("alibi", "relative", "relative_keys")
        or (is_simplified and (config.span is not None or config.has_mechanism))
    )
    if has_more or config.model_type not in (*LIKE_LLAMA, *FAMILIES):
        raise ConfigurationError(
            f"What a block of this {type(config).__name__} keeps for the backward pass is not known: it is for Llama, "
            "Mistral and Qwen2, and for families of this package without global projections, relative positions, "
            "ALiBi, linear attention, priors, reversible layers, routing heads or a decoder besides. Count it with "
            "torch.autograd.graph.saved_tensors_hooks."
        )


def head_width(config: Any) -> int:
    """Return the width of a head, which may be another than the share that it has of the hidden size."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def norm_bytes(config: Any, default: str, size: int) -> int:
    """Return the bytes that a norm keeps of a token: its input, its output and its statistics.

    An RMSNorm also keeps what it has normalised; the input, and in torch's norm this, too, are float32.
    """
    width = config.hidden_size
    if getattr(config, "norm_type", default) == "layernorm":
        return size * (2 * width + 2)
    normalised = size if config.model_type in LIKE_LLAMA else FLOAT32
    return FLOAT32 * (width + 1) + (normalised + size) * width


def shaped_bytes(config: Any, layer: int, size: int) -> float:
    """Return the bytes that shaped attention keeps of a token beyond softmax attention.

    These are its mean, the inputs of two gains, and the input of W^P if it exists; without W^V, the values are the
    output of the norm. In lower precision the gain of a skip keeps its input, which the norm keeps in float32.
    """
    has_value, has_projection = (not config.is_identity(layer, matrix) for matrix in ("value", "projection"))
    has_skip = not config.style.parallel and size < FLOAT32
    return config.hidden_size * size * (3 + has_projection - (not has_value) + has_skip) + FLOAT32 * RUNNING_MEAN


def head_bytes(model: PreTrainedModel, size: int) -> int:
    """Return the bytes that the last norm, an output layer over the vocabulary and the loss keep of a token."""
    config: Any = model.config
    has_norm = getattr(config, "norm_position", "pre") == "pre"
    norm = norm_bytes(config, "rmsnorm", size) if has_norm else size * config.hidden_size
    return norm + (FLOAT32 * config.vocab_size if model.get_output_embeddings() is not None else 0)
