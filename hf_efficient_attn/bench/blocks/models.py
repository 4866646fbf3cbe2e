"""The models that `bench blocks` compares, all of one shape, and what it times on each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from hf_efficient_attn.attention.cache_argument import CACHE_ARGUMENT
from hf_efficient_attn.bench.harness.timing import Case
from hf_efficient_attn.models.prologue import prepare_call
from hf_efficient_attn.models.simplified_transformer.configuration_simplified_transformer import (
    SimplifiedTransformerConfig,
)
from hf_efficient_attn.models.simplified_transformer.masks import block_masks
from hf_efficient_attn.training.optimizer_groups import optimizer_groups

GPT2 = "gpt2"
GPT2_FIELDS: dict[str, Any] = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
SEED = 0


@dataclass(frozen=True)
class Shape:
    """What the compared models have in common; `num_positions` is the length in tokens of their position table."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    num_positions: int
    hidden_act: str

    def config(self, name: str) -> SimplifiedTransformerConfig | GPT2Config:
        """Return the config of this shape for a block of ours, or of transformers' GPT-2 (`gpt2`), without dropout."""
        if name == GPT2:
            return GPT2Config(
                n_embd=self.hidden_size,
                n_layer=self.num_layers,
                n_head=self.num_heads,
                n_inner=self.intermediate_size,
                vocab_size=self.vocab_size,
                n_positions=self.num_positions,
                activation_function=self.hidden_act,
                **GPT2_FIELDS,
            )
        return SimplifiedTransformerConfig(
            block=name,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.num_positions,
            position_embedding_type="learned",
            hidden_act=self.hidden_act,
        )


def build_model(
    name: str, shape: Shape, dtype: str, device: torch.device, is_compiled: bool = False
) -> PreTrainedModel:
    """Return the language model called `name`, with weights drawn anew and SDPA as attention."""
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(
        shape.config(name), attn_implementation="sdpa", dtype=getattr(torch, dtype)
    )
    model = model.to(device)
    model.loss_type = "ForCausalLM"  # the default of GPT-2 too, which warns about it and breaks the compiled graph
    if is_compiled:
        model.compile()
    return model


def random_tokens(model: PreTrainedModel, batch_size: int, tokens: int) -> torch.Tensor:
    """Return random token ids, the same for every model of one vocabulary. Shape [batch_size, tokens]."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(model.config.vocab_size, (batch_size, tokens), generator=generator).to(model.device)


def training_step(model: PreTrainedModel, input_ids: torch.Tensor) -> Callable[[], None]:
    """Return a function that trains for one step: forward, loss, backward, AdamW as in Trainer, gradients freed."""
    optimizer = torch.optim.AdamW(optimizer_groups(model, weight_decay=0.1), lr=1e-4, fused=True)

    def step() -> None:
        model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_training_step(
    name: str, shape: dict[str, Any], dtype: str, device: str, is_compiled: bool, batch_size: int, tokens: int
) -> Callable[[], None]:
    """Return the training step of a new model; all arguments are of JSON types, `shape` has the fields of `Shape`."""
    model = build_model(name, Shape(**shape), dtype, torch.device(device), is_compiled).train()
    return training_step(model, random_tokens(model, batch_size, tokens))


def run_layers(model: PreTrainedModel, hidden_states: torch.Tensor) -> torch.Tensor:
    """Return what the blocks alone make of `hidden_states`, as the model calls them in causal training.

    Shapes: [batch, tokens, hidden] → the same.
    """
    backbone: Any = model.base_model
    if model.config.model_type == GPT2:
        for layer in backbone.h:
            hidden_states = layer(hidden_states)
        return hidden_states
    masks = block_masks(backbone.config, prepare_call(backbone.config, hidden_states, None, None, None, {}))
    for layer in backbone.layers:
        hidden_states = layer(hidden_states, **masks)[0]
    return hidden_states


def training_case(model: PreTrainedModel, batch_size: int, tokens: int) -> Case:
    """Return the case of one training step of the whole model on `batch_size` × `tokens` tokens."""
    step = training_step(model, random_tokens(model, batch_size, tokens))
    return Case(lambda _: step(), prepare=model.train)


def layers_case(model: PreTrainedModel, batch_size: int, tokens: int, is_compiled: bool) -> Case:
    """Return the case of forward and backward through the blocks alone, from a random hidden state on.

    Nothing but the blocks runs: no embedding, final norm, head, loss or optimizer. The hidden state gets a gradient.
    """
    generator = torch.Generator().manual_seed(SEED)
    size = (batch_size, tokens, model.config.hidden_size)
    hidden_states = torch.randn(size, generator=generator).to(model.device, model.dtype)
    target = torch.randn(size, generator=generator).to(model.device, model.dtype)
    forward = torch.compile(run_layers) if is_compiled else run_layers

    def prepare() -> torch.Tensor:
        model.train().zero_grad()
        return hidden_states.clone().requires_grad_()

    return Case(lambda inputs: forward(model, inputs).backward(target), prepare)


def prefill_case(model: PreTrainedModel, batch_size: int, tokens: int) -> Case:
    """Return the case of reading `batch_size` prompts of `tokens` tokens into a new cache."""
    input_ids = random_tokens(model, batch_size, tokens)
    return Case(lambda _: _read(model, input_ids, None), prepare=model.eval)


def decode_case(model: PreTrainedModel, batch_size: int, prompt_tokens: int, decode_tokens: int) -> Case:
    """Return the case of `decode_tokens` greedy steps with a cache that holds a prompt; reading it is not timed."""
    prompt = random_tokens(model, batch_size, prompt_tokens)

    def prepare() -> Any:
        model.eval()
        return _read(model, prompt, None)

    def run(output: Any) -> None:
        for _ in range(decode_tokens):
            output = _read(model, output.logits[:, -1:].argmax(-1), output[CACHE_ARGUMENT])

    return Case(run, prepare)


@torch.no_grad()
def _read(model: PreTrainedModel, input_ids: torch.Tensor, cache: Any) -> Any:
    return model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})


def count_parameters(model: PreTrainedModel) -> dict[str, int]:
    """Return the number of `all` parameters and of those in `weight_matrices`, tied ones once.

    Weight matrices are the 2-D parameters but for position tables: no norms, gains or biases.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tables = embeddings - {id(model.get_input_embeddings().weight)}
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2 and id(parameter) not in tables]
    return {"all": model.num_parameters(), "weight_matrices": sum(matrix.numel() for matrix in matrices)}
