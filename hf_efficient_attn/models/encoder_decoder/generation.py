"""Prompts of a decoder in `generate`, for decoders that count from the first token of a text."""

from typing import Any

import torch
from torch import Tensor


class LeftPaddedPrompts:
    """Mixin of heads for `generate`: padding of the decoder's prompts comes first, before the start token.

    `generate` wants the start token first, and so leaves a hole between it and a prompt that is padded on the left, or
    generates behind padding on the right. A masked token has a place in the tree of a text, though, and a hole would
    change what is generated. The tokens that `generate` returns then begin with the padding.

    Attributes:
        prompt_inputs: the names of inputs, besides the mask, with an entry for each token of a prompt.
    """

    prompt_inputs: tuple[str, ...] = ()

    def _prepare_decoder_input_ids_for_generation(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """As transformers', with padding first."""
        parent: Any = super()
        ids, options = parent._prepare_decoder_input_ids_for_generation(*args, **kwargs)
        mask = options.get("decoder_attention_mask")
        found = {name: options[name] for name in self.prompt_inputs if isinstance(options.get(name), Tensor)}
        for name, given in found.items():
            if given.ndim == 2 and given.shape[1] == ids.shape[1] - 1:
                # of a prompt without the start token, which is written before it: with the entry of the first token
                is_token = torch.ones_like(given) if mask is None else mask[:, -given.shape[1] :].to(given.device)
                first = is_token.int().argmax(1, keepdim=True)
                options[name] = torch.cat((given.gather(1, first), given), 1)
        # what has another shape is refused where the model reads it
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            order = mask.bool().int().argsort(dim=1, stable=True)
            ids = ids.gather(1, order.to(ids.device))
            for name in ("decoder_attention_mask", *found):
                if options[name].shape == ids.shape:
                    options[name] = options[name].gather(1, order.to(options[name].device))
        return ids, options
