"""Packed documents that no mask tells apart: flash attention's arguments, Ulysses, and caches."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import PATTERN, build, token_ids
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_efficient_attn as hea
from hf_efficient_attn.integration.interface import efficient_attention_forward

LENGTHS = (5, 7, 2)


def packing_arguments(lengths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return the ways in which collators tell documents of these lengths; "all" is that of a padding-free one."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None].int()
    flash = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(lengths), "max_length_k": max(lengths)}
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {
        "ends": flash,
        "numbers": {"seq_idx": numbers},
        "all": {**flash, "seq_idx": numbers, "position_ids": positions},
    }


ARGUMENTS = packing_arguments(LENGTHS)
ENDS, NUMBERS, POSITIONS = (
    ARGUMENTS["ends"]["cu_seq_lens_q"],
    ARGUMENTS["all"]["seq_idx"],
    ARGUMENTS["all"]["position_ids"],
)


def sparse(name: str, pattern: Any = PATTERN) -> Any:
    model = build(name, attn_implementation="efficient")
    return model if pattern is None else hea.sparsify(model, pattern)


def alone(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of each document computed by itself."""
    return torch.cat([model(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)], 1)


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize(("name", "pattern"), [("llama", PATTERN), ("llama", None), ("gemma3", None)])
@torch.no_grad()
def test_arguments_of_flash_attention_tell_documents_apart(
    name: str, pattern: Any, use_cache: bool, arguments: str
) -> None:
    model, ids = sparse(name, pattern), token_ids(1, 14)
    packed = model(ids, use_cache=use_cache, **ARGUMENTS[arguments]).logits
    torch.testing.assert_close(packed, alone(model, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("llama", "ends"), ("bert", "all"), pytest.param("gemma3", "numbers", marks=pytest.mark.thorough)],
)
def test_compiled_models_tell_documents_apart(name: str, arguments: str) -> None:
    """As eager ones do, with gradients, and other documents in another call of the same graph."""
    model, ids = sparse(name, None if name == "gemma3" else PATTERN), token_ids(1, 14)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for lengths in (LENGTHS, (3, 7, 4)):
        losses = [compiled(ids, **packing_arguments(lengths)[arguments]).logits.square().sum()]
        losses += [sum(model(part).logits.square().sum() for part in ids.split(lengths, 1))]
        torch.testing.assert_close(*losses)
        gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        for found, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "opt", "bert"])
@torch.no_grad()
def test_documents_need_positions_that_a_model_with_absolute_ones_can_see(name: str) -> None:
    model, ids = sparse(name), token_ids(1, 14)
    for arguments in ("ends", "numbers"):
        for positions in (None, torch.arange(14)[None]):
            with pytest.raises(hea.InputError, match="position_ids"):
                model(ids, position_ids=positions, **ARGUMENTS[arguments])
        packed = model(ids, **{**ARGUMENTS[arguments], "position_ids": POSITIONS}).logits
        torch.testing.assert_close(packed, alone(model, ids), atol=1e-5, rtol=1e-5)


def not_handed_on(name: str) -> Any:
    """Return a model whose layers are not told the positions."""
    model = sparse(name)

    def forget(module: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
        return inputs, {key: value for key, value in options.items() if key != "position_ids"}

    for layer in model.model.decoder.layers:
        layer.self_attn.register_forward_pre_hook(forget, with_kwargs=True)
    return model


def test_threads_are_told_of_their_own_positions() -> None:
    """Two forwards of one model, both of which have begun when the first layers ask."""
    model, ids = not_handed_on("opt"), token_ids(1, 14)
    barrier, logits, refused = threading.Barrier(2), dict[str, Tensor](), list[str]()
    expected = alone(model, ids)

    def wait(*_: object) -> None:
        barrier.wait(30)

    model.model.decoder.layers[0].register_forward_pre_hook(wait)

    def call(name: str, positions: Tensor) -> None:
        try:
            logits[name] = model(ids, **{**ARGUMENTS["ends"], "position_ids": positions}).logits
        except hea.InputError:
            refused.append(name)

    for counted in (("restart", "go on"), ("go on", "restart")):
        positions = {"restart": POSITIONS, "go on": torch.arange(14)[None]}
        logits.clear(), refused.clear()
        threads = [threading.Thread(target=call, args=(name, positions[name])) for name in counted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert refused == ["go on"]
        torch.testing.assert_close(logits["restart"], expected, atol=1e-5, rtol=1e-5)


def test_layers_that_another_thread_computes_again() -> None:
    """As the thread of a device does in the backward pass of checkpointed layers; other positions came in between."""
    model, ids = not_handed_on("opt").train(), token_ids(1, 14)
    gradients, packed = [], {**ARGUMENTS["ends"], "position_ids": POSITIONS}
    for is_checkpointed in (False, True):
        model.zero_grad()
        if is_checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        torch.manual_seed(0)
        loss = model(ids, labels=ids, use_cache=False, **packed).loss
        model(ids, position_ids=torch.arange(14)[None], use_cache=False)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_arguments_that_fit_no_tokens_are_refused() -> None:
    model = sparse("llama")
    for ends in ([0, 5, 12], [1, 14], [0, 9, 5, 14]):
        with pytest.raises(hea.InputError, match="they are the ends of the documents"):
            model(token_ids(1, 14), cu_seq_lens_q=torch.tensor(ends), cu_seq_lens_k=torch.tensor(ends))
    with pytest.raises(hea.InputError, match="one flattened row"):
        model(token_ids(2, 14), cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS)
    with pytest.raises(hea.InputError, match="seq_idx has shape"):
        model(token_ids(1, 14), seq_idx=NUMBERS[:, :5])
    for arguments in ({"seq_idx": NUMBERS.tolist()}, {"cu_seq_lens_q": ENDS.tolist()}):
        with pytest.raises(hea.InputError, match="must be a tensor of integers"):
            model(token_ids(1, 14), **arguments)
    matrix = torch.ones(1, 1, 14, 14, dtype=torch.bool)
    with pytest.raises(hea.InputError, match="matrix"):
        model(token_ids(1, 14), attention_mask=matrix, seq_idx=NUMBERS)


@pytest.fixture
def ulysses() -> Iterator[None]:
    """Put a function in the place of ours that does what DeepSpeed's does, in one process.

    No mask, the whole sequence, the positions of all tokens, and the heads of one process after those of another.
    """

    def by_heads(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **options: Any) -> Any:
        halves = zip(*(states.chunk(2, 1) for states in (query, key, value)), strict=True)
        outs = [efficient_attention_forward(module, *half, None, **options)[0] for half in halves]
        return torch.cat(outs, 2), None

    ALL_ATTENTION_FUNCTIONS["efficient"] = by_heads
    yield
    del ALL_ATTENTION_FUNCTIONS["efficient"]


@pytest.mark.parametrize(("name", "pattern"), [("llama", PATTERN), ("llama", None), ("gemma3", None)])
def test_ulysses_keeps_documents_apart(name: str, pattern: Any, request: pytest.FixtureRequest) -> None:
    model, ids = sparse(name, pattern), token_ids(2, 14)
    positions = torch.cat([POSITIONS, torch.arange(14)[None]])
    expected = model(ids, position_ids=positions, use_cache=False).logits
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    request.getfixturevalue("ulysses")
    actual = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    actual.square().sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-3, rtol=1e-4)


@pytest.mark.usefixtures("ulysses")
def test_ulysses_with_padding_is_refused() -> None:
    mask = torch.ones(1, 14, dtype=torch.long)
    mask[0, :3] = 0
    with pytest.raises(hea.UnsupportedBackendError, match="tokens would attend to padding"):
        sparse("llama")(token_ids(1, 14), attention_mask=mask)
    mask[:] = 1
    sparse("llama")(token_ids(1, 14), attention_mask=mask)


def test_padding_that_positions_tell_changes_nothing_under_ulysses(request: pytest.FixtureRequest) -> None:
    """Positions of padding are 1, as transformers makes them, or 0: each such token is a document of its own."""
    model, ids = sparse("llama"), token_ids(1, 14)
    expected = model(ids[:, 4:], use_cache=False).logits
    request.getfixturevalue("ulysses")
    for padding in (0, 1):
        positions = torch.cat([torch.full((1, 4), padding), torch.arange(10)[None]], 1)
        actual = model(ids, position_ids=positions, use_cache=False).logits[:, 4:]
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


UNSEEN: dict[str, tuple[str, dict[str, Any]]] = {
    "cached": ("llama", {"use_cache": True}),
    "masked": ("llama", {"use_cache": False, "attention_mask": torch.ones(1, 14)}),
    "encoder": ("bert", {}),
    "not handed on": ("modernbert", {}),
    "decoder": ("opt", {"use_cache": False}),
}


@pytest.mark.parametrize("unseen", UNSEEN)
@torch.no_grad()
def test_documents_that_cannot_be_seen_are_warned_of_once_a_model(unseen: str) -> None:
    name, options = UNSEEN[unseen]
    ids = token_ids(1, 14)
    for _ in range(2):
        model = sparse(name)
        with pytest.warns(UserWarning, match="Also pass seq_idx"):
            model(ids, position_ids=POSITIONS, **options)
        model(ids, position_ids=POSITIONS, **options)
    # what the warning says to do
    packed = model(ids, position_ids=POSITIONS, seq_idx=NUMBERS, **options).logits
    torch.testing.assert_close(packed, alone(model, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padding_with_a_cache_is_not_taken_for_documents(cache: str) -> None:
    model, ids = sparse("llama"), token_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, cache_implementation=cache)


def test_collator_with_flattening_trains_a_sparse_model() -> None:
    model, ids = sparse("llama"), token_ids(4, 6)
    rows = [{"input_ids": row[: 3 + index], "labels": row[: 3 + index]} for index, row in enumerate(ids.tolist())]
    collator = tr.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=False)
    batch = collator(rows)
    packed = model(**batch).loss
    texts = [torch.tensor(row["input_ids"])[None] for row in rows]
    losses = [model(text, labels=text).loss * (text.shape[1] - 1) for text in texts]
    torch.testing.assert_close(packed, sum(losses) / sum(text.shape[1] - 1 for text in texts))
