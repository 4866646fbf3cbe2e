"""What the backbone of the sparse encoder-decoder, its two stacks and its heads share."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from transformers import initialization as init

from hf_efficient_attn.models.base import SparsePreTrainedModel
from hf_efficient_attn.models.encoder_decoder.stacks import Stack
from hf_efficient_attn.models.parts.blocks import build_norm
from hf_efficient_attn.models.parts.embeddings import EmbeddingSum

from .configuration_sparse_seq2seq import SparseSeq2SeqConfig


class SparseSeq2SeqPreTrainedModel(SparsePreTrainedModel):
    """Weight initialisation, loading checks and capabilities."""

    config_class = SparseSeq2SeqConfig
    config: SparseSeq2SeqConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "sparse-seq2seq", "hf_efficient_attn"]
    extra_inputs = ("global_attention_mask",)
    _no_split_modules = ["SparseLayer", "SparseDecoderLayer"]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # copied and other special maps set their own start values
        if self.config.matrix_init == "glorot" and type(module) is nn.Linear:
            init.xavier_uniform_(module.weight)


class SparseSeq2SeqStack(Stack, SparseSeq2SeqPreTrainedModel):
    """Base of encoder and decoder: embeddings, blocks and, if pre-norm, a last norm.

    Args:
        embed, layers: see `Stack`.
        size_field: names the field that has the number of learned positions.
    """

    def __init__(
        self,
        config: SparseSeq2SeqConfig,
        embed: Callable[[Tensor], Tensor],
        layers: Iterable[nn.Module],
        size_field: str = "max_position_embeddings",
    ) -> None:
        norm = build_norm(config) if config.norm_position == "pre" else nn.Identity()
        super().__init__(config, embed, EmbeddingSum(config, size_field), layers, norm)
