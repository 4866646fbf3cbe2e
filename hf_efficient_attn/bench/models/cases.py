"""The encoders that `bench models` compares: transformers' own, and ours converted from them, with their weights."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from hf_efficient_attn.bench.harness.timing import Case
from hf_efficient_attn.convert.conversion import convert
from hf_efficient_attn.errors import EfficientAttentionError
from hf_efficient_attn.messages import shown

OURS, THEIRS = "ours", "transformers"
# what bounds any attention: BERT's linear maps around tokens that read only themselves
SELF_ONLY = "self_only"
SEED = 0
# a small vocabulary: the encoder is measured, not AdamW on a table of tokens
VOCAB_SIZE = 1024
WINDOW_TOKENS = 512
# largest difference of last hidden states, which are normed, that rounding explains
TOLERANCES = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3}


@dataclass(frozen=True)
class Shape:
    """What the compared encoders have in common. Dropouts of hidden states are transformers' default, 0.1."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    tokens: int
    batch_size: int
    attention_dropout: float
    dtype: str
    device: str

    def bert_like(self, model_type: str, **fields: Any) -> PreTrainedModel:
        """Return a new model of a type whose config has BERT's names, without pooler, with SDPA where it can."""
        config = AutoConfig.for_model(
            model_type,
            vocab_size=VOCAB_SIZE,
            num_hidden_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_heads,
            intermediate_size=self.intermediate_size,
            attention_probs_dropout_prob=self.attention_dropout,
            **{"max_position_embeddings": self.tokens, **fields},
        )
        return AutoModel.from_config(config, add_pooling_layer=False)  # type: ignore[no-any-return]

    def longformer(self) -> PreTrainedModel:
        """Return Longformer with a window of 512 in every layer."""
        # its positions count from pad_token_id + 1
        fields = {"max_position_embeddings": self.tokens + 2, "pad_token_id": 1, "type_vocab_size": 1}
        return self.bert_like("longformer", attention_window=WINDOW_TOKENS, **fields)

    def big_bird(self) -> PreTrainedModel:
        """Return BigBird-ITC with blocks of 64, three of them random."""
        return self.bert_like("big_bird", block_size=64, num_random_blocks=3)

    def bert(self) -> PreTrainedModel:
        """Return BERT, whose attention is torch's SDPA."""
        return self.bert_like("bert")

    def led(self) -> PreTrainedModel:
        """Return LED, of which only the encoder is used, with a window of 512 in every layer."""
        config = AutoConfig.for_model(
            "led",
            vocab_size=VOCAB_SIZE,
            d_model=self.hidden_size,
            encoder_layers=self.num_layers,
            encoder_attention_heads=self.num_heads,
            encoder_ffn_dim=self.intermediate_size,
            decoder_layers=1,
            decoder_attention_heads=self.num_heads,
            decoder_ffn_dim=self.intermediate_size,
            attention_dropout=self.attention_dropout,
            attention_window=WINDOW_TOKENS,
            max_encoder_position_embeddings=self.tokens,
        )
        return AutoModel.from_config(config)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Architecture:
    """An encoder of transformers and what it becomes here.

    Attributes:
        build: Shape → transformers' model.
        convert_options: of `convert`, beside the length.
        has_global_token: the first token is global.
        makers: whose encoders are measured; only ours, if transformers' one computes something else.
    """

    build: Callable[[Shape], PreTrainedModel]
    convert_options: dict[str, Any]
    has_global_token: bool = False
    makers: tuple[str, ...] = (OURS, THEIRS)


ARCHITECTURES = {
    "longformer": Architecture(Shape.longformer, {}, has_global_token=True),
    "led": Architecture(Shape.led, {}, has_global_token=True),
    "big_bird": Architecture(Shape.big_bird, {"parity": True}),
    "bert": Architecture(Shape.bert, {"pattern": "full()"}),
    SELF_ONLY: Architecture(Shape.bert, {"pattern": "band(0, 0)"}, makers=(OURS,)),
}


@dataclass(frozen=True)
class Encoder:
    """An encoder with what it is called with.

    Attributes:
        model: owns the parameters; more than the encoder has, if it is an encoder-decoder.
        inputs: keyword arguments of a call, of shape [batch, tokens].
    """

    model: PreTrainedModel
    inputs: dict[str, Tensor]

    def run(self) -> Tensor:
        """Return the last hidden state [batch, tokens, hidden_size]."""
        encoder = self.model.get_encoder() if self.model.config.is_encoder_decoder else self.model
        return encoder(**self.inputs).last_hidden_state  # type: ignore[no-any-return]


def build_encoder(name: str, by: str, shape: Shape) -> Encoder:
    """Return the encoder called `name`, by transformers or by us, with the weights that both have."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(SEED)
    model: Any = architecture.build(shape)
    generator = torch.Generator().manual_seed(SEED)
    # ids above those of padding and separators
    input_ids = torch.randint(8, VOCAB_SIZE, (shape.batch_size, shape.tokens), generator=generator)
    inputs = {"input_ids": input_ids}
    if by == OURS:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            model = convert(model, max_position_embeddings=shape.tokens, **architecture.convert_options)
        model.config.global_tokens = "first" if architecture.has_global_token else None
        model.config.random_blocks_in_eval = "fixed"
    elif architecture.has_global_token:
        inputs["global_attention_mask"] = torch.zeros_like(input_ids).index_fill_(1, torch.tensor(0), 1)
    model = model.to(shape.device, getattr(torch, shape.dtype))
    return Encoder(model, {key: tensor.to(shape.device) for key, tensor in inputs.items()})


def training_step(encoder: Encoder) -> Callable[[], None]:
    """Return a function that trains for one step: forward, loss, backward, AdamW, gradients freed.

    The loss is the mean squared distance of the last hidden state from a fixed random one; there is no head.
    """
    model = encoder.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(SEED)
    size = (*encoder.inputs["input_ids"].shape, model.config.hidden_size)
    target = torch.randn(size, generator=generator).to(model.device, model.dtype)

    def step() -> None:
        nn.functional.mse_loss(encoder.run(), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def read_new_encoder(name: str, by: str, shape: Shape) -> Tensor:
    """Return what `read_comparably` does of a new encoder."""
    return read_comparably(build_encoder(name, by, shape))


def build_cases(name: str, by: str, shape: Shape) -> dict[str, Case]:
    """Return what is timed of a new encoder, by measure."""
    encoder = build_encoder(name, by, shape)
    step = training_step(encoder)
    return {
        "forward": Case(lambda _: read(encoder), encoder.model.eval),
        "training": Case(lambda _: step(), encoder.model.train),
    }


def build_training_step(name: str, by: str, shape: dict[str, Any]) -> Callable[[], None]:
    """Return the training step of a new encoder; all arguments are of JSON types, `shape` has the fields of `Shape`."""
    return training_step(build_encoder(name, by, Shape(**shape)))


def largest_difference(name: str, ours: Tensor, theirs: Tensor, shape: Shape) -> float:
    """Return the largest difference between last hidden states, as `read_comparably` gives them.

    Raises:
        EfficientAttentionError: a difference larger than rounding explains.
    """
    difference = float((ours.float() - theirs.float()).abs().max())
    if not difference <= TOLERANCES[shape.dtype]:
        raise EfficientAttentionError(
            f"Ours and transformers' {name} differ by {difference:.1e} at {shape.tokens:,} tokens, more than rounding "
            f"({TOLERANCES[shape.dtype]:.0e}), so their speeds cannot be compared. Report this, or leave out "
            f"{shown(name)}."
        )
    return difference


def read_comparably(encoder: Encoder) -> Tensor:
    """Return the last hidden state in eval mode, of ours with what transformers' BigBird does there.

    In eval mode that one reads copies of block 0 in place of random blocks. When it is timed, ours always reads its
    random blocks.
    """
    encoder.model.config.random_blocks_in_eval = "transformers"
    output = read(encoder)
    encoder.model.config.random_blocks_in_eval = "fixed"
    return output


@torch.no_grad()
def read(encoder: Encoder) -> Tensor:
    """Return the last hidden state in eval mode, without gradients."""
    encoder.model.eval()
    return encoder.run()
