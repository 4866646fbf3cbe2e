"""What every family satisfies under masks, padding and packed documents; a part of `FamilyContract`."""

from functools import partial

import pytest
import torch
from models_cases import TINY, TOLERANCE, Case, first_tensor, random_ids

# what no mask and a mask of ones come to is the same to every kernel: thorough with the second
KERNELS_AND_MASKS = [
    pytest.param(kernel, mask, marks=[pytest.mark.thorough] * (kernel == "eager" and mask != "padded"))
    for kernel in ("sdpa", "eager")
    for mask in ("none", "ones", "padded")
]


def matrices(mask: torch.Tensor, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a padding mask [B, T] comes to as a matrix [B, 1, T, T], of bools, and to be added to scores."""
    batch_size, tokens = mask.shape
    allowed = mask[:, None, None].bool().expand(batch_size, 1, tokens, tokens)
    if is_causal:
        allowed = allowed & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return allowed, torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


class MasksContract:
    """The promises about which tokens a token reads."""

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_and_batch_mates_change_nothing(self, case: Case, auto_class: str, side: str) -> None:
        if auto_class.endswith("MultipleChoice"):
            pytest.skip("its inputs are three-dimensional; it pools what SequenceClassification pools")
        model = case.model(auto_class)
        ids, mate = random_ids(1, 7), random_ids(1, 12, seed=3)
        ids[:, 2] = mate[:, 2] = TINY["eos_token_id"]  # ends the question, where there is one
        padding = torch.zeros(1, 5, dtype=torch.long)
        order = (lambda a, b: [a, b]) if side == "left" else (lambda a, b: [b, a])
        padded = torch.cat(order(padding, ids), 1)
        mask = torch.cat(order(padding, torch.ones_like(ids)), 1)
        with torch.no_grad():
            alone = first_tensor(model(ids))
            together = first_tensor(
                model(torch.cat([padded, mate]), attention_mask=torch.cat([mask, torch.ones_like(mate)]))
            )[:1]
        if auto_class != "AutoModelForSequenceClassification":
            together = together[:, 5:] if side == "left" else together[:, :7]
        torch.testing.assert_close(together, alone, atol=TOLERANCE, rtol=TOLERANCE)

    def test_rounding_of_projections_decides_nothing(self, case: Case) -> None:
        """States of equal tokens differ by rounding, which shapes and processors decide on: it must choose no keys."""
        model, ids = case.model(), 3 + random_ids(2, 24) % 2
        noise = torch.Generator().manual_seed(0)

        def rounded(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
            return output * (1 + 2e-7 * torch.randn(output.shape, generator=noise))

        with torch.no_grad():
            expected = model(ids).logits
            for module in model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_hook(rounded)
            torch.testing.assert_close(model(ids).logits, expected, atol=TOLERANCE, rtol=TOLERANCE)

    def test_what_stands_beside_a_text_changes_nothing(self, case: Case) -> None:
        """Other rows, padding on both sides and, in causal models, what follows: for several texts and choices."""
        for changes in ({}, *case.choices):
            model = case.model("AutoModel", **changes).double()
            for tokens in range(5, 14, 2):
                # each token once: of equal ones, rounding may decide which comes first
                words = torch.randperm(58, generator=torch.Generator().manual_seed(tokens)) + 3
                ids, mates = words[None, :tokens], random_ids(2, 18, seed=tokens)
                padded = torch.nn.functional.pad(ids, (2, 16 - tokens))
                mask = torch.nn.functional.pad(torch.ones_like(ids), (2, 16 - tokens))
                with torch.no_grad():
                    alone = model(ids).last_hidden_state
                    inputs = torch.cat([padded, mates]), torch.cat([mask, torch.ones_like(mates)])
                    found = [model(inputs[0], attention_mask=inputs[1]).last_hidden_state[:1, 2 : tokens + 2]]
                    if case.is_causal:
                        found.append(model(words[None, :18]).last_hidden_state[:, :tokens])
                for other in found:
                    torch.testing.assert_close(
                        other, alone, atol=1e-9, rtol=1e-9, msg=partial("{}: {}".format, changes)
                    )

    @pytest.mark.parametrize(("kernel", "mask"), KERNELS_AND_MASKS)
    def test_packed_documents_do_not_see_each_other(self, case: Case, kernel: str, mask: str) -> None:
        """Called as a training loop calls it: nothing said about the cache."""
        model = case.model()
        model.set_attn_implementation(kernel)
        documents = [random_ids(1, length, seed=length) for length in (5, 1, 9)]
        positions = torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None]
        ids = torch.cat(documents, 1)
        inputs = {}
        if mask != "none":
            inputs["attention_mask"] = torch.ones_like(ids)
        if mask == "padded":
            ids = torch.cat([torch.zeros(1, 2, dtype=torch.long), ids, torch.zeros(1, 3, dtype=torch.long)], 1)
            positions = torch.nn.functional.pad(positions, (2, 3), value=1)
            inputs["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (2, 3))
        with torch.no_grad():
            packed = model(ids, position_ids=positions, **inputs).logits
            alone = torch.cat([model(document).logits for document in documents], 1)
        packed = packed[:, 2:-3] if mask == "padded" else packed
        torch.testing.assert_close(packed, alone, atol=TOLERANCE, rtol=TOLERANCE)

    @pytest.mark.parametrize("kernel", ["sdpa", "eager"])
    def test_four_dimensional_mask_equals_padding_mask(self, case: Case, kernel: str) -> None:
        model = case.model()
        model.set_attn_implementation(kernel)
        ids = random_ids(2, 9)
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0
        with torch.no_grad():
            by_padding = model(ids, attention_mask=mask, use_cache=False).logits
            for matrix in matrices(mask, case.is_causal):
                by_matrix = model(ids, attention_mask=matrix, use_cache=False).logits
                real = mask.bool()
                torch.testing.assert_close(by_matrix[real], by_padding[real], atol=TOLERANCE, rtol=TOLERANCE)

    def test_heads_find_the_padding_of_a_four_dimensional_mask(self, case: Case) -> None:
        """Embeddings tell no padding, and on the right it moves no position."""
        if "AutoModelForSequenceClassification" not in case.heads:
            pytest.skip("it classifies no texts")
        model = case.model("AutoModelForSequenceClassification")
        embeds = model.get_input_embeddings()(random_ids(2, 9)).detach()
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[0, 6:] = 0
        with torch.no_grad():
            by_padding = model(inputs_embeds=embeds, attention_mask=mask).logits
            for matrix in matrices(mask, case.is_causal):
                by_matrix = model(inputs_embeds=embeds, attention_mask=matrix).logits
                torch.testing.assert_close(by_matrix, by_padding, atol=TOLERANCE, rtol=TOLERANCE)
