"""What the backbone of the sparse encoder-decoder, its two stacks and its heads share."""

from collections.abc import Callable, Iterable
from dataclasses import fields

from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.output_capturing import OutputRecorder

from hf_efficient_attn.models.base import SparsePreTrainedModel
from hf_efficient_attn.models.parts.blocks import build_norm
from hf_efficient_attn.models.parts.embeddings import EmbeddingSum

from .configuration_sparse_seq2seq import SparseSeq2SeqConfig


class SparseSeq2SeqPreTrainedModel(SparsePreTrainedModel):
    """Weight initialisation, loading checks and capabilities."""

    config_class = SparseSeq2SeqConfig
    config: SparseSeq2SeqConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "sparse-seq2seq", "hf_efficient_attn"]
    _no_split_modules = ["SparseLayer", "SparseDecoderLayer"]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # copied and other special maps set their own start values
        if self.config.matrix_init == "glorot" and type(module) is nn.Linear:
            init.xavier_uniform_(module.weight)


def record_layers(layer_class: type[nn.Module], count: str) -> OutputRecorder:
    """Return the recorder of a stack's hidden states; `count` is the config's attribute with its number of layers.

    Versions of transformers that cannot select hidden states by negative numbers neither take nor need the count.
    """
    named = {field.name for field in fields(OutputRecorder)}
    return OutputRecorder(layer_class, **({"num_hidden_layers_key": count} if "num_hidden_layers_key" in named else {}))


class SparseSeq2SeqStack(SparseSeq2SeqPreTrainedModel):
    """Base of encoder and decoder: embeddings, blocks and, if pre-norm, a last norm.

    Args:
        embed: looks up the token embedding, which source and target share, in the model, so that replacing it there
            (resizing, adapters) affects both stacks.
        layers: the blocks.
        size_field: names the field that has the number of learned positions.
    """

    _tp_plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}

    def __init__(
        self,
        config: SparseSeq2SeqConfig,
        embed: Callable[[Tensor], Tensor],
        layers: Iterable[nn.Module],
        size_field: str = "max_position_embeddings",
    ) -> None:
        super().__init__(config)
        self.embed = embed
        self.embeddings = EmbeddingSum(config, size_field)
        self.layers = nn.ModuleList(layers)
        self.norm = build_norm(config) if config.norm_position == "pre" else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()
