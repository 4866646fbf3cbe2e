"""The two stacks of an encoder-decoder: what they are made of, and what each does before its first layer."""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.utils.output_capturing import OutputRecorder

from hf_efficient_attn.attention.input_checks import check_mask_values
from hf_efficient_attn.attention.processes import compare_processes
from hf_efficient_attn.models.encoder_decoder.cross_attention import with_cross_attention
from hf_efficient_attn.models.encoder_decoder.inputs import check_positions, check_source_mask
from hf_efficient_attn.models.prologue import PreparedCall, prepare_call
from hf_efficient_attn.models.sparse.inputs import check_inputs


def record_layers(layer_class: type[nn.Module], count: str) -> OutputRecorder:
    """Return the recorder of a stack's hidden states; `count` is the config's attribute with its number of layers.

    Versions of transformers that cannot select hidden states by negative numbers neither take nor need the count.
    """
    named = {field.name for field in fields(OutputRecorder)}
    return OutputRecorder(layer_class, **({"num_hidden_layers_key": count} if "num_hidden_layers_key" in named else {}))


class Stack:
    """Mixin over a family's `PreTrainedModel`: embeddings, blocks and a last norm.

    Args:
        embed: a method of the model that looks up the token embedding, which source and target share, so that
            replacing it there (resizing, adapters) affects both stacks.
        embeddings: what follows: positions, norm, dropout.
        layers: the blocks.
        norm: what follows the last block.
    """

    _tp_plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}

    def __init__(
        self,
        config: Any,
        embed: Callable[[Tensor], Tensor],
        embeddings: nn.Module,
        layers: Iterable[nn.Module],
        norm: nn.Module,
    ) -> None:
        super().__init__(config)
        self.embed = embed
        self.embeddings = embeddings
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding of the model, which both stacks share."""
        owner: Any = self.embed.__self__  # type: ignore[attr-defined]
        return owner.get_input_embeddings()  # type: ignore[no-any-return]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding of the model, and so of both stacks."""
        owner: Any = self.embed.__self__  # type: ignore[attr-defined]
        owner.set_input_embeddings(value)

    def source_call(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        options: dict[str, Any],
    ) -> PreparedCall:
        """Return the inputs of an encoder, checked and completed.

        options: the call's other arguments.
        """
        check_inputs(self.config, input_ids, inputs_embeds)
        compare_processes(self)
        check_positions(options)
        embedded = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        check_source_mask(attention_mask, embedded.shape[1])
        return prepare_call(self.config, embedded, attention_mask, None, None, options)

    def target_call(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        cache: Cache | None,
        inputs_embeds: Tensor | None,
        use_cache: bool | None,
        options: dict[str, Any],
    ) -> PreparedCall:
        """Return the inputs of a decoder, checked and completed, with a cache that has room for the source, if any.

        use_cache: None: as the config says.
        """
        check_inputs(self.config, input_ids, inputs_embeds)
        embedded = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        check_mask_values(attention_mask)
        cache = with_cross_attention(cache)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and cache is None and not (self.gradient_checkpointing and self.training):
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        return prepare_call(self.config, embedded, attention_mask, None, cache, options)
