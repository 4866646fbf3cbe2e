"""What every encoder-decoder family satisfies under masks and padding; a part of `Seq2SeqContract`."""

import pytest
import torch
from models_cases import TOLERANCE, first_tensor
from seq2seq_cases import TINY, Seq2SeqCase, random_ids
from torch import Tensor

import hf_efficient_attn as hea


def padded(ids: Tensor, tokens: int, side: str) -> tuple[Tensor, Tensor]:
    """Return the tokens and their mask with `tokens` of padding on one side."""
    amount = (tokens, 0) if side == "left" else (0, tokens)
    return torch.nn.functional.pad(ids, amount), torch.nn.functional.pad(torch.ones_like(ids), amount)


class Seq2SeqMasksContract:
    """The promises about which tokens of source and target a token reads."""

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_source_padding_and_batch_mates_change_nothing(self, case: Seq2SeqCase, auto_class: str, side: str) -> None:
        model = case.model(auto_class)
        ids, mate = random_ids(1, 7), random_ids(1, 12, seed=3)
        ids[:, 4] = mate[:, 4] = TINY["eos_token_id"]
        ids[:, 2] = mate[:, 2] = TINY["sep_token_id"]
        source, mask = padded(ids, 5, side)
        inputs = {"input_ids": torch.cat([source, mate]), "attention_mask": torch.cat([mask, torch.ones_like(mate)])}
        target = {"decoder_input_ids": random_ids(1, 6)} if auto_class in ("AutoModelForSeq2SeqLM", "AutoModel") else {}
        targets = {name: each.expand(2, -1) for name, each in target.items()}
        with torch.no_grad():
            alone = first_tensor(model(ids, **target))
            together = first_tensor(model(**inputs, **targets))[:1]
        if auto_class == "AutoModelForQuestionAnswering":
            together = together[:, 5:] if side == "left" else together[:, :7]
        torch.testing.assert_close(together, alone, atol=TOLERANCE, rtol=TOLERANCE)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_target_padding_and_batch_mates_change_nothing(self, case: Seq2SeqCase, side: str) -> None:
        model = case.model()
        ids, target, mate = random_ids(1, 9), random_ids(1, 4, seed=5), random_ids(1, 7, seed=6)
        both, mask = padded(target, 3, side)
        with torch.no_grad():
            alone = model(ids, decoder_input_ids=target).logits
            together = model(
                ids.expand(2, -1),
                decoder_input_ids=torch.cat([both, mate]),
                decoder_attention_mask=torch.cat([mask, torch.ones_like(mate)]),
            ).logits[:1]
        together = together[:, 3:] if side == "left" else together[:, :4]
        torch.testing.assert_close(together, alone, atol=TOLERANCE, rtol=TOLERANCE)

    def test_future_target_tokens_do_not_leak(self, case: Seq2SeqCase) -> None:
        model = case.model()
        ids, target = random_ids(1, 9), random_ids(1, 8)
        changed = target.clone()
        changed[0, 5:] = (changed[0, 5:] + 7) % 50 + 3
        with torch.no_grad():
            before, after = (model(ids, decoder_input_ids=each).logits for each in (target, changed))
        torch.testing.assert_close(after[:, :5], before[:, :5], atol=1e-6, rtol=0)
        assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)

    def test_packed_documents_are_refused(self, case: Seq2SeqCase) -> None:
        ids = random_ids(1, 6)
        for name in ("position_ids", "decoder_position_ids"):
            with pytest.raises(hea.InputError, match="cannot be packed"):
                case.model()(ids, decoder_input_ids=ids, **{name: torch.tensor([[0, 1, 2, 0, 1, 2]])})
