"""PatternCache(positions="cache"): keys are read by their slots, as if they were cached before RoPE."""

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import DECODER, padding, token_ids
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.integration import interface
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.patterns import Band, GlobalTokens

# first tokens, and tokens before a query, by layer
KEPT = ((2, 4), (1, 3))
PATTERNS = [Band(left, 0) | GlobalTokens(range(num_first)) for num_first, left in KEPT]
FULL = {"layer_types": ["full_attention"] * 2, "head_dim": 8}
# a config, how many numbers of a head its two layers rotate, and whether neighbours or the halves are pairs
ROTARY: dict[str, tuple[Any, tuple[int, int], bool]] = {
    "llama": (lambda: tr.LlamaConfig(**DECODER), (8, 8), False),
    "gpt_neox": (lambda: tr.GPTNeoXConfig(**{**DECODER, "rotary_pct": 0.5}), (4, 4), False),
    "glm": (lambda: tr.GlmConfig(**DECODER, head_dim=8), (4, 4), True),
    "gemma3": (lambda: tr.Gemma3TextConfig(**DECODER, **FULL), (8, 8), False),
    "smollm3": (lambda: tr.SmolLM3Config(**DECODER, no_rope_layers=[1, 0]), (8, 0), False),
}


class Oracle:
    """Attention of one text, token by token, whose keys are cached before RoPE and rotated by their slots.

    The model must be called with position 0 for every token, so that it rotates nothing itself.
    """

    def __init__(self, rotary_dims: Sequence[int], are_neighbours: bool, theta: float) -> None:
        self.rotary_dims, self.are_neighbours, self.theta = rotary_dims, are_neighbours, theta
        self.cached: dict[int, tuple[Tensor, Tensor]] = {}

    def rotated(self, states: Tensor, slots: Tensor, rotary_dim: int) -> Tensor:
        if rotary_dim == 0:
            return states
        angles = slots[:, None] * self.theta ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
        pairs = states[..., :rotary_dim].unflatten(-1, (-1, 2) if self.are_neighbours else (2, -1))
        x, y = pairs.unbind(-1 if self.are_neighbours else -2)
        stacked = torch.stack([x * angles.cos() - y * angles.sin(), x * angles.sin() + y * angles.cos()], -1)
        flat = stacked if self.are_neighbours else stacked.transpose(-1, -2)
        return torch.cat([flat.flatten(-2), states[..., rotary_dim:]], -1)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        assert query.shape[2] == 1
        layer, groups = module.layer_idx, query.shape[1] // key.shape[1]
        keys, values = self.cached.get(layer, (key[:, :, :0], value[:, :, :0]))
        query_slot = torch.tensor([keys.shape[2]]).double()
        keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        slots, rotary_dim = torch.arange(keys.shape[2]).double(), self.rotary_dims[layer]
        rotated = self.rotated(keys, slots, rotary_dim).repeat_interleave(groups, 1)
        scores = self.rotated(query, query_slot, rotary_dim) @ rotated.transpose(2, 3) * scaling
        num_first, left = KEPT[layer]
        stay = [slot for slot in range(keys.shape[2]) if slot < num_first or slot >= keys.shape[2] - left]
        self.cached[layer] = keys[:, :, stay], values[:, :, stay]
        return (scores.softmax(-1) @ values.repeat_interleave(groups, 1)).transpose(1, 2), None


def tiny(name: str) -> Any:
    """Return a model in float64 with weights large enough for attention to matter."""
    torch.manual_seed(0)
    model = tr.AutoModelForCausalLM.from_config(ROTARY[name][0]()).eval().double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.4)
    return model


def theta_of(config: Any) -> float:
    parameters = config.rope_parameters
    return parameters.get("full_attention", parameters)["rope_theta"]


@torch.no_grad()
def oracle_logits(model: Any, name: str, text: Tensor) -> Tensor:
    """Return what follows each token of one text, [tokens, vocabulary]; the model has no pattern."""
    _, rotary_dims, are_neighbours = ROTARY[name]
    tr.AttentionInterface.register("oracle", Oracle(rotary_dims, are_neighbours, theta_of(model.config)))
    model.set_attn_implementation("oracle")
    zero = torch.zeros(1, 1, dtype=torch.long)
    return torch.cat([model(token[None, None], position_ids=zero, use_cache=False).logits[0] for token in text])


@torch.no_grad()
def cached_logits(model: Any, cache: Any, ids: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return what follows each token, given so many at a time, [batch, tokens, vocabulary]."""
    logits, stop = [], 0
    for size in sizes:
        start, stop = stop, stop + size
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:stop]
        logits.append(
            model(
                ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=positions, **{CACHE_ARGUMENT: cache}
            ).logits
        )
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", ROTARY)
def test_keys_are_read_by_their_slots(name: str) -> None:
    """A prompt longer than the window, steps, and several tokens at once behind them; rows of different lengths."""
    ids = token_ids(3, 20)
    mask = padding(ids, "left")
    mask[1, :13] = 0
    expected = [oracle_logits(tiny(name), name, row[kept.bool()]) for row, kept in zip(ids, mask, strict=True)]
    model = hea.sparsify(tiny(name), PATTERNS)
    text_logits = cached_logits(model, hea.PatternCache(model), ids, mask, [20])
    actual = cached_logits(model, hea.PatternCache(model, positions="cache"), ids, mask, [11, 1, 1, 5, 1, 1])
    for row, kept in enumerate(mask.bool()):
        # tables of the models are float32
        torch.testing.assert_close(actual[row, kept], expected[row], atol=2e-5, rtol=2e-5)
    assert (text_logits[0, -1] - expected[0][-1]).abs().max() > 0.01


def test_beams_keep_their_rows() -> None:
    """Beams are reordered: the score of each text found is that of its tokens one by one."""
    ids = token_ids(2, 9)
    mask = padding(ids, "left")
    model = hea.sparsify(tiny("llama"), PATTERNS)
    options = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0, "max_new_tokens": 9}
    cache = hea.PatternCache(model, positions="cache")
    found = model.generate(
        ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, eos_token_id=None, return_dict_in_generate=True,
        output_scores=True, pad_token_id=0, **options
    )  # fmt: skip
    assert (found.beam_indices[:, :-1].diff(dim=1) != 0).any()
    for row, text in enumerate(found.sequences):
        text = text[mask[row // 3].argmax() :]
        scores = oracle_logits(tiny("llama"), "llama", text).log_softmax(-1)[-10:-1]
        expected = scores.gather(1, text[-9:, None]).sum()
        torch.testing.assert_close(found.sequences_scores[row].double(), expected, atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_what_is_kept_is_never_rotated() -> None:
    """In bfloat16, too: each step rotates the first keys of the prompt, and rounding does not add up."""
    model, ids = hea.sparsify(tiny("llama").bfloat16(), PATTERNS), token_ids(2, 30)
    cache = hea.PatternCache(model, positions="cache")
    cached_logits(model, cache, ids, torch.ones_like(ids), [4])
    before = [layer.keys[:, :, :num_first].clone() for layer, (num_first, _) in zip(cache.layers, KEPT, strict=True)]
    mask = torch.ones_like(ids)
    for stop in range(5, 31):
        positions = torch.tensor([[stop - 1]])
        last = model(
            ids[:, stop - 1 : stop], attention_mask=mask[:, :stop], position_ids=positions, **{CACHE_ARGUMENT: cache}
        ).logits
    assert last.isfinite().all()
    for layer, first in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys[:, :, : first.shape[2]], first)


@pytest.mark.parametrize("sizes", [[60], [1] * 60], ids=["at_once", "in_steps"])
@torch.no_grad()
def test_no_distance_is_larger_than_the_cache(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """A model trained for 16 tokens reads 60; every key is the same arrow before RoPE, so that angles are distances."""
    rope = {"rope_type": "linear", "rope_theta": 1.0, "factor": 100.0}
    fields = {**DECODER, "num_hidden_layers": 1, "head_dim": 2, "max_position_embeddings": 16, "attention_bias": True}
    model = tr.LlamaForCausalLM(tr.LlamaConfig(**fields, rope_parameters=rope)).eval().double()
    hea.sparsify(model, Band(6, 0) | GlobalTokens([0, 1]))
    for projection in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj):
        projection.weight.zero_()
        projection.bias.copy_(torch.tensor([1.0, 0.0]).repeat(len(projection.bias) // 2))
    distances: dict[tuple[int, int], int] = {}
    attend = interface.attend_layer

    def measure(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        angles = (query[0, 0] @ key[0, 0].T).clamp(-1, 1).acos() * 100
        stop, num_keys = cache.get_seq_length(), key.shape[2]
        for row, angle in zip(range(stop - query.shape[2], stop), angles, strict=True):
            texts = [*range(min(2, num_keys)), *range(stop - num_keys + 2, stop)]
            for position, distance in zip(texts, angle.tolist(), strict=True):
                if position <= row and (position < 2 or row - position <= 6):
                    distances[row, position] = round(distance)
        return attend(query, key, *args, **kwargs)

    cache = hea.PatternCache(model, positions="cache")
    monkeypatch.setattr(interface, "attend_layer", measure)
    cached_logits(model, cache, token_ids(1, 60), torch.ones(1, 60, dtype=torch.long), sizes)
    assert set(distances) == {(row, key) for row in range(60) for key in range(row + 1) if key < 2 or row - key <= 6}
    for (row, position), distance in distances.items():
        assert distance == (min(row, 8) - position if position < 2 else row - position), (row, position)
    assert max(distances.values()) == 8


@torch.no_grad()
def test_compiled_steps_and_copied_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("llama"), token_ids(2, 11)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    hea.sparsify(model, PATTERNS[:1])
    caches = [hea.PatternCache(model, positions="cache")]
    model(ids[:, :9], **{CACHE_ARGUMENT: caches[0]})
    caches += [copy.deepcopy(caches[0]), copy.deepcopy(caches[0]), pickle.loads(pickle.dumps(caches[0]))]
    models = (model, torch.compile(model, backend="eager", fullgraph=True), model, model)
    for column in (9, 10):
        inputs = {"input_ids": ids[:, column : column + 1], "position_ids": torch.tensor([[column]])}
        logits = [each(**inputs, **{CACHE_ARGUMENT: cache}).logits for each, cache in zip(models, caches, strict=True)]
        for other in logits[1:]:
            torch.testing.assert_close(other, logits[0])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    # as a model on "efficient" does before it fills the cache
    caches[0].is_followed = True
    with pytest.raises(hea.UnsupportedBackendError, match="Compile only steps of one token"):
        caches[0].update(torch.zeros(2, 2, 2, 8), torch.zeros(2, 2, 2, 8), 0)


def test_a_cache_goes_on_and_can_be_used_again() -> None:
    model, ids = hea.sparsify(tiny("llama"), PATTERNS), token_ids(2, 14)
    cache = hea.PatternCache(model, positions="cache")
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    first = model.generate(ids, **{CACHE_ARGUMENT: cache}, **options)
    longer = torch.cat([first, token_ids(2, 3)], 1)
    after = model.generate(longer, **{CACHE_ARGUMENT: cache}, **options)
    cache.reset()
    assert torch.equal(model.generate(longer, **{CACHE_ARGUMENT: cache}, **options), after)


@torch.no_grad()
def test_layers_that_attend_twice_and_how_a_text_is_cut() -> None:
    """DiffLlama's layers attend once for each half of their values."""
    model, ids = tr.DiffLlamaForCausalLM(tr.DiffLlamaConfig(**DECODER)).eval().double(), token_ids(1, 20)
    model, mask = hea.sparsify(model, PATTERNS), torch.ones_like(ids)
    at_once, in_steps = (
        cached_logits(model, hea.PatternCache(model, positions="cache"), ids, mask, sizes) for sizes in ([20], [1] * 20)
    )
    torch.testing.assert_close(at_once, in_steps, atol=1e-6, rtol=1e-6)


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    "longrope": {
        "rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    },
    "M-RoPE": {"rope_type": "default", "mrope_section": [1, 1, 2]},
}  # fmt: skip


def refused_model(why: str) -> Any:
    if why in ROPES:
        rope = {"rope_theta": 10000.0, **ROPES[why]}
        if why == "M-RoPE":
            return tr.Qwen2VLTextModel(tr.Qwen2VLTextConfig(**DECODER, rope_parameters=rope))
        return tr.LlamaForCausalLM(tr.LlamaConfig(**DECODER, rope_parameters=rope))
    if why == "no weights":
        with torch.device("meta"):
            return tr.LlamaForCausalLM(tr.LlamaConfig(**DECODER))
    if why == "no rotary_emb":
        return tr.GPT2LMHeadModel(tr.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61))
    if why == "share":
        return tr.HrmTextForCausalLM(tr.HrmTextConfig(**DECODER, head_dim=8))
    if why == "values":
        ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        return tr.MiniCPM3ForCausalLM(tr.MiniCPM3Config(**{**DECODER, **ranks, "num_key_value_heads": 4}))
    model = tr.HunYuanDenseV1ForCausalLM(tr.HunYuanDenseV1Config(**DECODER, head_dim=8))
    # keys are scaled after their rotation, each number of a head by another factor
    torch.nn.init.normal_(model.model.layers[0].self_attn.key_layernorm.weight)
    return model


@pytest.mark.parametrize("why", [*ROPES, "no weights", "no rotary_emb", "share", "values", "more than its rotary_emb"])
def test_models_without_plain_rope_are_refused(why: str) -> None:
    model = hea.sparsify(refused_model(why).eval(), PATTERNS[0])
    # in older versions of transformers, the function that rotates by several positions has another name
    said = {"M-RoPE": "(M-RoPE|no apply_rotary_pos_emb)"}.get(why, why)
    with pytest.raises(hea.ConfigurationError, match=f"{said}.*PatternCache.model."):
        hea.PatternCache(model, positions="cache")
    hea.PatternCache(model)


@torch.no_grad()
def test_wrong_uses_are_refused() -> None:
    model = hea.sparsify(tiny("llama"), PATTERNS)
    with pytest.raises(hea.ConfigurationError, match="Pass the model"):
        hea.PatternCache(model.config, positions="cache")
    with pytest.raises(hea.ConfigurationError, match="'text'"):
        hea.PatternCache(model, positions="slots")
    with pytest.raises(hea.ConfigurationError, match=r"Call model.eval\(\) first.$"):
        hea.PatternCache(copy.deepcopy(model).train(), positions="cache")
    cache, ids = hea.PatternCache(model, positions="cache"), token_ids(1, 20)
    other = hea.sparsify(tiny("gemma3"), PATTERNS)
    with pytest.raises(hea.ConfigurationError, match="a model with the RoPE"):
        other(ids, **{CACHE_ARGUMENT: cache})
    keys = torch.zeros(1, 2, 20, 8)
    cache.update(keys, keys, 0)
    with pytest.raises(hea.UnsupportedBackendError, match="call the model of this cache"):
        cache.update(keys, keys, 0)
    cache.reset()
    model(ids, **{CACHE_ARGUMENT: cache})
