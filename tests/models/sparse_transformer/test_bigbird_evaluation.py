"""BigBird as transformers evaluates it: `random_blocks_in_eval="transformers"` and `full_attention_up_to`."""

from typing import Any

import pytest
import torch
from models_cases import randomize

import hf_efficient_attn as hea

Config = hea.SparseTransformerConfig
SHAPE = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LENGTHS = (33, 60)


def build(**fields: Any) -> Any:
    config = Config.bigbird_itc(block_tokens=4, **{**SHAPE, "random_blocks_in_eval": "transformers", **fields})
    return randomize(hea.SparseTransformerModel(config).eval())


def packed() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return two documents, and the inputs of both in one row."""
    documents = [torch.randint(1, 50, (1, tokens)) for tokens in LENGTHS]
    positions = torch.cat([torch.arange(tokens) for tokens in LENGTHS])[None]
    return documents, {"input_ids": torch.cat(documents, 1), "position_ids": positions}


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side: str) -> None:
    model, ids = build(), torch.randint(1, 50, (1, 91))
    padded = torch.nn.functional.pad(ids, (7, 0) if side == "left" else (0, 7))
    with torch.no_grad():
        together = model(padded, attention_mask=(padded != 0).long()).last_hidden_state
        alone = model(ids).last_hidden_state
    together = together[:, 7:] if side == "left" else together[:, :91]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padding", [(0, 0), (3, 5)])
def test_packed_documents_are_evaluated_as_if_alone(padding: tuple[int, int]) -> None:
    model, (documents, inputs) = build(), packed()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs = {name: torch.nn.functional.pad(tensor, padding) for name, tensor in inputs.items()}
    with torch.no_grad():
        together = model(**inputs).last_hidden_state[:, padding[0] : padding[0] + sum(LENGTHS)]
        alone = torch.cat([model(document).last_hidden_state for document in documents], 1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_full_attention_of_short_inputs_cannot_be_packed_into_long_ones() -> None:
    model, (documents, inputs) = build(full_attention_up_to=40), packed()
    with pytest.raises(hea.InputError, match="full_attention_up_to=40"):
        model(**inputs)
    model.config.full_attention_up_to = 93
    with torch.no_grad():
        together = model(**inputs).last_hidden_state
        alone = torch.cat([model(document).last_hidden_state for document in documents], 1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_compiles_and_refuses_the_same() -> None:
    model, (_, inputs) = build(full_attention_up_to=40), packed()
    ids = inputs["input_ids"]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = compiled(input_ids=ids, position_ids=torch.arange(93)[None]).last_hidden_state
        torch.testing.assert_close(found, model(ids).last_hidden_state, atol=1e-5, rtol=1e-5)
        with pytest.raises(RuntimeError, match="full_attention_up_to=40"):
            compiled(**inputs)
