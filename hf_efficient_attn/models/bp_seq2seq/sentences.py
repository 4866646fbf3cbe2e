"""Sentences of a document and of its translation: a token of the target reads that sentence of the source alone.

As the authors align them, a target token is of the sentence of the token that is predicted from it: the one that ends a
sentence reads the next. Source: the authors' code of Ye, Guo, Gan, Qiu, Zhang (arXiv:1911.04070), for IWSLT.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.models.inputs.whole_numbers import check_integers

# of the source, and of the target
INPUTS = ("sentence_ids", "decoder_sentence_ids")


def check_sentences(of_source: Tensor | None, of_target: Tensor | None, source: Tensor, target: Tensor) -> None:
    """Raise InputError for numbers of sentences that are not given for both sides, or not for each token.

    source, target: the tokens of this call, [B, S, X] and [B, T, X], of which only the shapes matter.
    """
    for name, given, states, tokens in zip(
        INPUTS, (of_source, of_target), (source, target), ("source", "new target"), strict=True
    ):
        if given is not None:
            check_numbers(name, given, states.shape[:2], tokens)
        elif of_source is not None or of_target is not None:
            raise InputError(
                f"{INPUTS[1 - INPUTS.index(name)]} is given without {name}, and a target token reads the source's "
                "tokens of the same sentence. Pass both, or none where it reads all of the source."
            )


def check_numbers(name: str, given: Tensor, shape: tuple[int, ...], tokens: str) -> None:
    """Raise InputError for numbers of sentences that are no integers, or not one for each token; tokens: in words."""
    check_integers(name, given, "sentences")
    if tuple(given.shape) != tuple(shape):
        raise InputError(f"{name} has shape {list(given.shape)}; it must be [batch, {tokens} tokens] = {list(shape)}.")


def aligned_source(readable: TokenMask, of_source: Tensor | None, of_target: Tensor | None) -> TokenMask:
    """Return which source tokens a target token reads: those of its own sentence, if sentences are aligned.

    Args:
        readable: which source tokens are no padding.
        of_source, of_target: the sentence of each token, [B, S] and [B, T]; None: sentences are not aligned.
    """
    if of_source is None or of_target is None:
        return readable
    return replace(readable, segment_ids=of_source.to(of_target.device), query_segment_ids=of_target)


class SentencePrompts:
    """Mixin of heads for `generate` with `sentence_ids`: a token behind one that ends a sentence reads the next.

    That token is the config's `sentence_end_token_id`. Numbers of a prompt may be given; otherwise it begins with the
    first sentence of the source.
    """

    # of a prompt, which `LeftPaddedPrompts` puts in order
    prompt_inputs = INPUTS[1:]

    def _prepare_decoder_input_ids_for_generation(
        self, batch_size: int, model_input_name: str, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """As the parent's, with the sentences of the prompt; numbers of labels (Trainer's) are none of a prompt.

        Raises:
            InputError: numbers that are not one for each token of the source, or of the prompt; numbers of sentences
                that leave some out.
        """
        parent: Any = super()
        if model_kwargs.get("labels") is not None and model_kwargs.get("decoder_input_ids") is None:
            model_kwargs = {name: each for name, each in model_kwargs.items() if name != INPUTS[1]}
        ids, options = parent._prepare_decoder_input_ids_for_generation(
            batch_size, model_input_name, model_kwargs, *args, **kwargs
        )
        of_source, of_prompt = (options.get(name) for name in INPUTS)
        if of_source is not None:
            check_numbers(INPUTS[0], of_source, options["encoder_outputs"][0].shape[:2], "source")
            self.check_one_by_one(of_source, options.get("attention_mask"))
        if of_prompt is not None:
            check_numbers(INPUTS[1], of_prompt, ids.shape, "prompt")
        elif of_source is not None:
            first = first_sentence(of_source, options.get("attention_mask")).to(ids.device)
            start = first_real(options.get("decoder_attention_mask"), ids)
            options[INPUTS[1]] = first + self.ended(ids, start + 1)
        return ids, options

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As the parent's, with the sentences of the new tokens."""
        parent: Any = super()
        inputs: dict[str, Any] = parent.prepare_inputs_for_generation(input_ids, *args, **kwargs)
        of_prompt = kwargs.get(INPUTS[1])
        if of_prompt is not None:
            size = of_prompt.shape[1]
            of_written = of_prompt[:, -1:] + self.ended(input_ids, size)[:, size:]
            new = inputs["decoder_input_ids"].shape[1]
            inputs[INPUTS[1]] = torch.cat((of_prompt, of_written), 1)[:, -new:]
        return inputs

    def check_one_by_one(self, of_source: Tensor, mask: Tensor | None) -> None:
        """Raise InputError where the next sentence of a source has not the next number, though one is gone on to."""
        if self.config.sentence_end_token_id is None:  # type: ignore[attr-defined]
            return
        numbers = on_host(of_source)
        is_real = torch.ones_like(numbers) if mask is None else on_host(mask)
        for row, (own, real) in enumerate(zip(numbers, is_real, strict=True)):
            held = own[real != 0].unique()
            if len(held) and int(held[-1] - held[0]) >= len(held):
                raise InputError(
                    f"sentence_ids of row {row} are {len(held)} numbers from {int(held[0])} to {int(held[-1])}, but "
                    "generate goes on from a sentence to the one with the next number: number sentences one by one."
                )

    def ended(self, ids: Tensor, start: Tensor | int) -> Tensor:
        """Return how many sentences have ended with each token, [B, K], counted from the column `start` on."""
        end = self.config.sentence_end_token_id  # type: ignore[attr-defined]
        if end is None:
            return torch.zeros_like(ids)
        is_counted = torch.arange(ids.shape[1], device=ids.device) >= start
        return ((ids == end) & is_counted).long().cumsum(1)


def first_sentence(of_source: Tensor, mask: Tensor | None) -> Tensor:
    """Return the number of the first sentence of each source, [B, 1]; mask: 1 = a token, [B, S]."""
    return of_source.gather(1, first_real(mask, of_source).to(of_source.device))


def first_real(mask: Tensor | None, ids: Tensor) -> Tensor:
    """Return the column of the first token of each row that is no padding, [B, 1]."""
    if mask is None:
        return torch.zeros_like(ids[:, :1], dtype=torch.long)
    return mask.int().argmax(1, keepdim=True).to(ids.device)
