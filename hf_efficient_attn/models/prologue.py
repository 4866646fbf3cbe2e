"""What every backbone does once before its first layer: cache, lengths, masks, positions, packed documents."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from hf_efficient_attn.attention.build_call import refuse_misspelt
from hf_efficient_attn.attention.sharded.shards import SequenceShards
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.forward_context import takes_cache
from hf_efficient_attn.integration.packing import parsed_positions
from hf_efficient_attn.integration.unsupported import MARKED, refuse_paged
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.models.inputs import (
    LayerInputs,
    check_mask,
    check_positions,
    key_masks,
    noted_documents,
    step_table,
)


def backbone_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backbone's `forward`: defaults of the config, recorded outputs, `past_key_values` as a name of `cache`."""
    return takes_cache(merge_with_config_defaults(capture_outputs(forward)))


@dataclass(frozen=True)
class PreparedCall:
    """The inputs of a forward pass, checked and completed.

    Attributes:
        embedded: the new tokens, [B, T, hidden_size].
        attention_mask: as the caller gave it: [B, K] over cached and new tokens, a matrix, a token table, or None.
        position_ids: [B or 1, T]; None: they are counted over the real tokens.
        documents: the number of each token's packed document, [B, T]; None: nothing is packed.
        cache: filled by the layers; None: nothing is cached.
        past_tokens, num_keys: the number of cached tokens, and the number of keys in attention.
    """

    embedded: Tensor
    attention_mask: Any
    position_ids: Tensor | None
    documents: Tensor | None
    cache: Cache | None
    past_tokens: int | Tensor
    num_keys: int

    @property
    def batch_size(self) -> int:
        """B, the number of rows."""
        # not `len`, which the compiler would treat as a constant
        return self.embedded.shape[0]

    @property
    def tokens(self) -> int:
        """T, the number of new tokens of a row."""
        return self.embedded.shape[1]

    @property
    def real_tokens(self) -> Tensor | None:
        """Which new tokens are not padding, bool [B, T]; None: unknown."""
        mask = self.attention_mask
        return mask[:, -self.tokens :].bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def own_real_tokens(self, tokens: TokenMask, shards: SequenceShards | None) -> Tensor | None:
        """Return `real_tokens` of this process; if `shards` share the texts, `tokens` is the mask of whole texts."""
        if shards is None or tokens.key_mask is None or tokens.shape is None:
            return self.real_tokens
        return tokens.key_mask[:, shards.own(tokens.shape[1])]

    def masks(self, config: Any, is_causal: bool | None = None) -> LayerInputs:
        """Return what the layers need to know about the keys, see `key_masks`.

        is_causal: whether the layers are causal; None: as the config says.
        """
        is_causal = config.is_causal if is_causal is None else is_causal
        return key_masks(config, self.embedded, self.attention_mask, self.cache, self.documents, is_causal)


def prepare_call(
    config: Any,
    embedded: Tensor,
    attention_mask: Any,
    position_ids: Tensor | None,
    cache: Cache | None,
    options: Mapping[str, Any],
    use_cache: bool | None = False,
) -> PreparedCall:
    """Return the inputs of a forward pass, checked and completed.

    Args:
        options: the call's other arguments, which may say where documents begin (`cu_seq_lens_q`, `seq_idx`).
        use_cache: whether to make a cache for a causal model that was given none.

    Raises:
        InputError: a mask or positions of another length, a mask of other values than 0 and 1; documents and positions
            that contradict each other, or that follow cached tokens; options that the model would ignore.
    """
    refuse_paged(cache)
    refuse_unread(config, options)
    batch_size, tokens = embedded.shape[:2]
    if use_cache and config.is_causal and cache is None:
        cache = DynamicCache(config=config)
    past_tokens, num_keys = lengths(cache, tokens)
    check_mask(attention_mask, batch_size, tokens, past_tokens, room=num_keys)
    check_positions(position_ids, batch_size, tokens)
    position_ids = parsed_positions(position_ids, options, batch_size, tokens, past_tokens)
    documents = noted_documents(config, position_ids, attention_mask, batch_size, past_tokens, cache)
    return PreparedCall(embedded, attention_mask, position_ids, documents, cache, past_tokens, num_keys)


def refuse_unread(config: Any, options: Mapping[str, Any]) -> None:
    """Raise InputError for arguments that some models of transformers use and this one would ignore.

    Token types that are all 0, as a tokenizer returns for single texts, are accepted; while compiling, any are.
    """
    family = config.model_type
    types = options.get("token_type_ids")
    if isinstance(types, Tensor) and not torch.compiler.is_compiling() and bool(on_host(types).any()):
        raise InputError(
            f"token_type_ids has types other than 0, but {family} models have no token types. Leave them out: only "
            "separators mark the parts of a pair."
        )
    if options.get(MARKED) is not None:
        raise InputError(
            f"{family} models do not take {MARKED}. Leave it out; sparse_transformer, sparse_seq2seq and sparsified "
            "models of transformers take it."
        )
    if options.get("head_mask") is not None:
        raise InputError(
            "head_mask is not supported; transformers 5 has also removed it from its own models. Leave it out; to "
            "switch a head off, set its columns of the output projection to zero."
        )
    refuse_misspelt(options)


def lengths(cache: Cache | None, tokens: int) -> tuple[int | Tensor, int]:
    """Return the number of cached tokens, and the number of keys in attention with `tokens` new ones."""
    if cache is None:
        return 0, tokens
    return cache.get_seq_length(), cache.get_mask_sizes(tokens, 0)[0]


class TableGeneration:
    """Mixin for causal heads: masks of constant shape for `generate` with a static cache, as compilation needs."""

    @staticmethod
    @takes_cache
    def create_masks_for_generate(
        config: Any,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the token table of one step."""
        is_causal = config.is_encoder_decoder or config.is_causal
        return step_table(config, inputs_embeds, attention_mask, cache, is_causal, position_ids)
