"""Comparisons that the contracts of decoders, encoders and encoder-decoders have in common."""

import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models_cases import TOLERANCE, first_tensor
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT

Inputs = dict[str, Any]

# the fields of outputs with the weights of decoders
WEIGHTS = ("attentions", "decoder_attentions")

BEAMS: list[Any] = [
    {"num_beams": 3},
    # to the cache the same as other beams
    pytest.param({"num_beams": 2, "num_return_sequences": 2}, marks=pytest.mark.thorough),
]


def check_save_and_load(model: Any, auto_class: str, inputs: Inputs, folder: Path) -> None:
    """Check that weights, buffers and config come back from a folder, and so do outputs."""
    model.save_pretrained(folder)
    assert not list(folder.glob("*.bin"))
    again = getattr(transformers, auto_class).from_pretrained(folder, dtype=model.dtype).eval()
    assert getattr(again.config, "attention_pattern", None) == getattr(model.config, "attention_pattern", None)
    saved, loaded = ({**each.state_dict(), **dict(each.named_buffers())} for each in (model, again))
    assert saved.keys() == loaded.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, loaded[name]), name
    with torch.no_grad():
        # equal weights at another memory alignment may take another kernel: equal to rounding, not to the bit
        tolerance = 1e-6 if model.dtype == torch.float32 else 1e-1
        expected, actual = first_tensor(model(**inputs)), first_tensor(again(**inputs))
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def decode(
    model: Any, ids: Tensor, sizes: Iterable[int], cache: Any = None, mask: Tensor | None = None, name: str = "logits"
) -> tuple[Tensor, Any]:
    """Return what a model computes of a text that it reads in steps of these sizes, joined, and the cache."""
    parts, start = [], 0
    for size in sizes:
        stop = start + size
        options = {} if mask is None else {"attention_mask": mask[:, :stop]}
        out = model(ids[:, start:stop], **options, **{CACHE_ARGUMENT: cache}, use_cache=True)
        cache, start = out.past_key_values, stop
        parts.append(out[name])
    return torch.cat(parts, 1), cache


def kept_bytes(run: Callable[[], Tensor], parameters: Iterable[Tensor] = ()) -> int:
    """Return the bytes that autograd keeps for the backward pass of what `run` returns, without those of parameters."""
    known, kept = {each.data_ptr() for each in parameters}, {}

    def note(saved: Tensor) -> Tensor:
        if saved.data_ptr() not in known:
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        out = run()
    total = sum(kept.values())
    out.sum().backward()
    return total


def check_cached_generation(generate: Callable[..., Tensor], kinds: Iterable[str] = (), **options: Any) -> None:
    """Check that `generate` returns the same tokens with a cache, also one of these kinds, and without."""
    uncached = generate(use_cache=False, **options)
    for more in ({}, *({"cache_implementation": kind} for kind in kinds)):
        assert torch.equal(generate(use_cache=True, **options, **more), uncached)


def check_compiled_training(model: torch.nn.Module, inputs: Inputs) -> None:
    """Check that a model compiles to one graph, trains, and has the same loss."""
    torch._dynamo.reset()
    # centroids move in every forward pass
    start = copy.deepcopy(model.state_dict())
    actual = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).loss
    actual.backward()
    model.load_state_dict(start)
    # behind it: a model that has been called before knows its patterns
    expected = model(**inputs).loss
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def compile_for_any_length(model: torch.nn.Module, calls: list[Inputs]) -> tuple[list[Any], int]:
    """Return what a compiled model returns for each of these calls, and to how many graphs they are compiled."""
    graphs = []
    torch._dynamo.reset()

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count, dynamic=True)
    return [compiled(**inputs) for inputs in calls], len(graphs)


def check_exported(
    model: torch.nn.Module, inputs: Callable[..., Inputs], shapes: dict[str, Any], sizes: list[tuple[int, ...]]
) -> None:
    """Check that a model, exported with inputs of the first sizes, computes the same with inputs of the others."""
    program = torch.export.export(model, (), inputs(*sizes[0]), dynamic_shapes=shapes, strict=False).module()
    for others in sizes[1:]:
        actual, expected = program(**inputs(*others)), model(**inputs(*others))
        torch.testing.assert_close(actual.logits, expected.logits, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(actual.loss, expected.loss, atol=TOLERANCE, rtol=TOLERANCE)


def check_compiled_steps(model: Any, ids: Tensor, need_weights: bool, **others: Any) -> None:
    """Check that steps in a static cache, with unwritten places behind the queries, compile to what eager ones compute.

    They are three of one token, by fewer programs; with weights, for which transformers breaks graphs, all at once.

    ids: nine a text, of a decoder, or of an encoder-decoder's target.
    """
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def steps(run: Any) -> Iterator[Any]:
        config, is_pair = model.config.get_text_config(decoder=True), model.config.is_encoder_decoder
        parts: list[Any] = [transformers.StaticCache(config=config, max_cache_len=size) for size in (12, 9)]
        cache, name = (
            (transformers.EncoderDecoderCache(*parts), "decoder_input_ids") if is_pair else (parts[0], "input_ids")
        )
        options = {**others, CACHE_ARGUMENT: cache}
        model(**{name: ids[:, :-3]}, **options)
        for new in ids[:, -3:].split(3 if need_weights else 1, 1):
            yield run(**{name: new}, output_attentions=need_weights, **options)

    compiled = torch.compile(model, backend=count, fullgraph=not need_weights)
    with torch.no_grad():
        try:
            expected = list(steps(model))
        except hea.UnsupportedBackendError as refusal:
            if need_weights and "output_attentions" in str(refusal):
                return
            raise
        for found, plain in zip(steps(compiled), expected, strict=True):
            torch.testing.assert_close(found.logits, plain.logits, atol=TOLERANCE, rtol=TOLERANCE)
            for field in WEIGHTS:
                torch.testing.assert_close(found.get(field), plain.get(field), atol=TOLERANCE, rtol=TOLERANCE)
    assert len(graphs) < 3 or need_weights
