"""Threads that share a model, a module or a cache get what each would get alone."""

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import seq2seq_cases
import torch
from attention_models import PATTERN, build
from interleaved import at_every_line
from models_cases import TINY, randomize
from torch import Tensor, nn

import hf_efficient_attn as hea
from hf_efficient_attn.attention.select import preferred_backend, use_backend
from hf_efficient_attn.integration.layer_patterns import module_pattern
from hf_efficient_attn.integration.masks import TABLE_DTYPE, read_table
from hf_efficient_attn.layout import dense_mask
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.sparse.attention import remembered
from hf_efficient_attn.patterns import Band, Causal, Pattern

CPU = torch.device("cpu")
NUM_FORWARDS, NUM_EXAMPLES, TOKENS = 150, 8, 24


def table_with_padding(num_masked: int) -> Tensor:
    return (torch.arange(6) >= num_masked).to(TABLE_DTYPE)[None, None, None]


def test_token_table_of_another_thread() -> None:
    mine, other = table_with_padding(1), table_with_padding(4)
    for _ in range(2):
        tokens, _ = at_every_line(
            lambda: read_table(mine, 1, 6, 6), lambda: read_table(other, 1, 6, 6), "integration.masks"
        )
        assert tokens.key_mask.sum() == 5


def test_layers_share_the_mask_of_a_table() -> None:
    table = table_with_padding(1)
    first = read_table(table, 1, 6, 6)
    read_table(table_with_padding(2), 1, 6, 6)
    assert read_table(table, 1, 6, 6) is first
    table[..., 1] = 0
    assert read_table(table, 1, 6, 6)[0].key_mask.sum() == 4  # type: ignore[union-attr]


def test_masks_of_another_thread() -> None:
    numbers = iter(range(1000, 2000))

    def mask(left: int, key_mask: Tensor) -> Tensor:
        layout = Layout(Band(left, 0), 1, 4, 4)
        return dense_mask.additive_mask(layout, TokenMask(key_mask=key_mask), 1, CPU, torch.float32)[0]  # type: ignore[return-value]

    mine, other = torch.tensor([[True, True, True, False]]), torch.tensor([[False, True, True, True]])
    expected = mask(2, mine).clone()
    for module in ("layout.dense_mask", "layout.cache"):
        assert torch.equal(at_every_line(lambda: mask(2, mine), lambda: mask(next(numbers), other), module), expected)


class Layer(nn.Module):
    """An attention layer of a model with a pattern, for both directions."""

    layer_idx = 0
    config = SimpleNamespace(
        attention_pattern={"kind": "band", "left": 3, "right": 3}, num_hidden_layers=1, _attn_implementation="efficient"
    )


def test_layer_that_another_thread_calls_causally() -> None:
    layer: Any = Layer()
    pattern = at_every_line(
        lambda: module_pattern(layer, False), lambda: module_pattern(layer, True), "integration.layer_patterns"
    )
    assert pattern == Band(3, 3)


def widened(pattern: Pattern, left: int) -> Pattern:
    return pattern | Band(left, 0)


def test_pattern_that_another_thread_makes() -> None:
    layer = Layer()
    made = at_every_line(
        lambda: remembered(layer, widened, Causal(), 1), lambda: remembered(layer, widened, Causal(), 2),
        "models.sparse.attention",
    )  # fmt: skip
    assert made == Causal() | Band(1, 0)


def test_backends_preferred_by_two_threads() -> None:
    entered, left = threading.Event(), threading.Event()

    def first() -> None:
        with use_backend("sdpa"):
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(10)
    with use_backend("blocked"):
        left.set()
        thread.join()
        assert preferred_backend() == "blocked"
    assert preferred_backend() == "auto"


def test_chosen_keys_of_several_threads() -> None:
    """Each with keys of its own, forward and backward."""
    q = torch.randn(1, 2, 48, 8)
    listed = [torch.randint(0, 48, (1, 2, 48, 5)) for _ in range(4)]

    def gradient(tokens: Tensor) -> Tensor:
        leaf = q.clone().requires_grad_()
        hea.attention(leaf, leaf, leaf, Causal(), chosen=hea.ChosenTokens(tokens), backend="gathered").sum().backward()
        return leaf.grad  # type: ignore[return-value]

    expected = [gradient(tokens) for tokens in listed]
    with ThreadPoolExecutor(4) as pool:
        for found in (list(pool.map(gradient, listed)) for _ in range(5)):
            assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


def masks() -> Tensor:
    """Return masks [examples, 2, tokens], each with other padding, on either side."""
    masks = torch.ones(NUM_EXAMPLES, 2, TOKENS, dtype=torch.long)
    for example in range(1, NUM_EXAMPLES):
        if example % 2:
            masks[example, 0, :example] = 0
        else:
            masks[example, 1, -example:] = 0
    return masks


def forwards() -> dict[str, Callable[[int], Tensor]]:
    """Return by the name of a model what it computes of the example of a number."""
    llama = hea.sparsify(build("llama"), PATTERN)
    torch.manual_seed(0)
    longformer = randomize(hea.SparseTransformerModel(hea.SparseTransformerConfig.longformer(**TINY)).eval())
    led = randomize(hea.SparseSeq2SeqModel(hea.SparseSeq2SeqConfig.led(**seq2seq_cases.TINY)).eval())
    ids, mask = torch.randint(3, 60, (NUM_EXAMPLES, 2, TOKENS)), masks()
    # global tokens at another place in every example
    chosen = torch.arange(TOKENS)[None, None] == (TOKENS // 2 - torch.arange(NUM_EXAMPLES) // 2)[:, None, None]
    chosen = chosen.expand(-1, 2, -1).long()
    return {
        "llama": lambda i: llama(ids[i], attention_mask=mask[i]).logits,
        "longformer": lambda i: (
            longformer(ids[i], attention_mask=mask[i], global_attention_mask=chosen[i]).last_hidden_state
        ),
        "led": lambda i: led(ids[i], attention_mask=mask[i], decoder_input_ids=ids[i, :, :5]).last_hidden_state,
    }


def test_many_forwards() -> None:
    """Of shared models, on inputs of one length and different padding: every bit is that of a single thread.

    Every second one runs under inference mode, the others under no_grad.
    """
    every = forwards()
    with torch.no_grad():
        expected = {name: [forward(i) for i in range(NUM_EXAMPLES)] for name, forward in every.items()}
    draw = random.Random(0)
    asked = [(draw.choice(sorted(every)), draw.randrange(NUM_EXAMPLES)) for _ in range(NUM_FORWARDS)]

    def is_wrong(number: int) -> bool:
        name, example = asked[number]
        with torch.inference_mode() if number % 2 else torch.no_grad():
            return not torch.equal(every[name](example), expected[name][example])

    switching = sys.getswitchinterval()
    # threads take turns a thousand times as often as they would
    sys.setswitchinterval(5e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(is_wrong, range(NUM_FORWARDS))) == 0
    finally:
        sys.setswitchinterval(switching)
