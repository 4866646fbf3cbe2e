"""What a sparsified model was called with is known while its forward pass runs, and to nobody afterwards."""

import threading
from typing import Any

import pytest
import torch
from attention_models import build, token_ids

import hf_efficient_attn as hea
from hf_efficient_attn.integration import forward_context
from hf_efficient_attn.patterns import Band


def called(model: Any, found: list[Any], **options: Any) -> None:
    """Call a model, and note in its first layer what is known of the call."""
    layer = model.model.layers[0]

    def note(*_: Any) -> None:
        running = forward_context._running.get()
        found.append((len(running), forward_context.given_positions(model.config)))

    hook = layer.register_forward_hook(note)
    try:
        model(**options)
    finally:
        hook.remove()


def test_it_is_known_within_the_forward_pass_alone() -> None:
    """Of the model and of the one below its head, in every thread by itself."""
    model, ids, found = hea.sparsify(build("llama"), Band(3, 0)), token_ids(1, 9), []
    positions = torch.arange(9)[None]
    called(model, found, input_ids=ids, position_ids=positions)
    others: list[Any] = []
    thread = threading.Thread(target=called, args=(model, others), kwargs={"input_ids": ids})
    thread.start()
    thread.join()
    ((depth, known),) = found
    assert depth == 2
    assert torch.equal(known, positions)
    assert others[0][0] == 2
    assert others[0][1] is not positions
    assert forward_context._running.get() == ()
    assert forward_context.given_positions(model.config) is None


def test_it_ends_where_a_forward_pass_fails() -> None:
    model, ids = hea.sparsify(build("llama"), Band(3, 0)), token_ids(1, 9)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    model.model.layers[0].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        model(ids)
    assert forward_context._running.get() == ()


# older versions of transformers know no other name
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_layers_that_are_computed_again_know_none() -> None:
    """With gradient checkpointing a backward pass calls layers after the forward pass of their model."""
    gradients: list[Any] = []
    seen: list[Any] = []
    for is_checkpointed in (False, True):
        model = hea.sparsify(build("llama"), Band(3, 0)).train()
        if is_checkpointed:
            model.gradient_checkpointing_enable()
            model.model.layers[0].self_attn.register_forward_hook(
                lambda *_: seen.append(forward_context._running.get())
            )
        model(token_ids(1, 9), position_ids=torch.arange(9)[None], use_cache=False).logits.square().sum().backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    torch.testing.assert_close(*gradients)
    assert [len(each) for each in seen] == [2, 0]
