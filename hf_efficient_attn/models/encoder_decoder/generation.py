"""Prompts of a decoder in `generate`, for decoders that count from the first token of a text."""

from typing import Any

from torch import Tensor


class LeftPaddedPrompts:
    """Mixin of heads for `generate`: padding of the decoder's prompts comes first, before the start token.

    `generate` wants the start token first, and so leaves a hole between it and a prompt that is padded on the left, or
    generates behind padding on the right. A masked token has a place in the tree of a text, though, and a hole would
    change what is generated. The tokens that `generate` returns then begin with the padding.
    """

    def _prepare_decoder_input_ids_for_generation(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """As transformers', with padding first."""
        parent: Any = super()
        ids, options = parent._prepare_decoder_input_ids_for_generation(*args, **kwargs)
        mask = options.get("decoder_attention_mask")
        # a mask of another shape is refused where the model reads it
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            order = mask.bool().int().argsort(dim=1, stable=True)
            ids = ids.gather(1, order.to(ids.device))
            options["decoder_attention_mask"] = mask.gather(1, order)
        return ids, options
