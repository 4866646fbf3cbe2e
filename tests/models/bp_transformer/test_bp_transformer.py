"""Trees by their specification, node by node; caches, pairs of sentences, presets, losses of layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from models.bp_transformer.tiny_models import build
from models.bp_transformer.tree_by_nodes import pair_by_nodes, tree_by_nodes
from models.shared_checks import decode
from models_cases import TOLERANCE, random_ids, trainer_arguments
from torch import Tensor
from torch.nn.functional import pad
from transformers import Trainer

import hf_efficient_attn as hea
from hf_efficient_attn.attention.layer import weights_of_rows
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.models.tree.nodes import next_nodes

FORMS: dict[str, dict[str, Any]] = {
    "both sides": {"num_nodes": 1, "clip_distance": 2, "num_hidden_layers": 3},
    "left": {"num_nodes": 2, "clip_distance": 1, "is_causal": True},
    "without relations": {"num_nodes": 3, "position_embedding_type": "learned"},
}
# two holes, one of them a whole span, and padding on either side
HOLES = [False, True, True, False, True, False, False, False, False, True, True, True, True, False]


def gradients(model: Any, outputs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of a sum that no output takes part in evenly."""
    total = sum((each * torch.arange(each.numel(), dtype=each.dtype).view_as(each).sin()).sum() for each in outputs)
    named = {name: each for name, each in model.named_parameters() if not name.startswith("embed_tokens")}
    return dict(zip(named, torch.autograd.grad(total, list(named.values()), allow_unused=True), strict=True))


def compare(model: Any, ids: Tensor, mask: list[bool]) -> None:
    """Compare states and gradients of a row with the specification; masks are counted from the first real token."""
    first, last = mask.index(True), len(mask) - 1 - mask[::-1].index(True)
    real = torch.tensor(mask)
    found = model(ids, attention_mask=real[None].long())
    weights = dict(model.named_parameters())
    embedded = weights["embed_tokens.weight"][ids[0]]
    if "positions.table.weight" in weights:
        embedded = embedded + weights["positions.table.weight"][(real.cumsum(0) - 1).clamp(min=0)]
    inside = slice(first, last + 1)
    tokens, root = tree_by_nodes(model.config, weights, embedded[inside], mask[inside])
    expected, actual = (tokens[real[inside]], root), (found.last_hidden_state[0, real], found.pooler_output[0])
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)
    wanted = gradients(model, expected)
    for name, each in gradients(model, actual).items():
        other = torch.zeros_like(each) if wanted[name] is None else wanted[name]
        torch.testing.assert_close(each, other, atol=1e-10, rtol=1e-8, msg=name)


@pytest.mark.parametrize("tokens", [1, 2, 3, 6, 8, 13])
@pytest.mark.parametrize("form", FORMS)
def test_states_and_gradients_are_those_of_the_specification(form: str, tokens: int) -> None:
    compare(build("AutoModel", **FORMS[form]).double(), random_ids(1, tokens), [True] * tokens)


@pytest.mark.parametrize("form", FORMS)
def test_masked_tokens_are_not_read_nor_spans_of_them_alone(form: str) -> None:
    compare(build("AutoModel", **FORMS[form]).double(), random_ids(1, len(HOLES)), HOLES)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_compute_the_same(form: str) -> None:
    with hea.use_backend("blocked"):
        compare(build("AutoModel", **{**FORMS[form], "num_hidden_layers": 2}).double(), random_ids(1, 37), [True] * 37)


@pytest.mark.parametrize("is_causal", [True, False])
def test_documents_with_holes_are_as_alone(is_causal: bool) -> None:
    model = build("AutoModel", is_causal=is_causal, num_nodes=1).double()
    lengths = (5, 12, 3)
    mask = torch.tensor([True] * 5 + HOLES[1:-1] + [True] * 3)[None]
    ids, numbers = random_ids(1, 20), torch.arange(3).repeat_interleave(torch.tensor(lengths))[None]
    with torch.no_grad():
        packed = model(ids, mask.long(), seq_idx=numbers).last_hidden_state
        parts = zip(ids.split(lengths, 1), mask.split(lengths, 1), strict=True)
        alone = torch.cat([model(part, own.long()).last_hidden_state for part, own in parts], 1)
    torch.testing.assert_close(packed[mask], alone[mask], atol=1e-12, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:output_attentions=True")
def test_weights_of_tokens_are_shown() -> None:
    """Of all tokens, of some, and of those behind a cache."""
    model, ids = build("AutoModel", is_causal=True), random_ids(2, 9)
    with torch.no_grad():
        whole = model(ids, output_attentions=True, use_cache=False).attentions
        with weights_of_rows((2, 7)):
            some = model(ids, output_attentions=True, use_cache=False).attentions
        cache = model(ids[:, :6], use_cache=True).past_key_values
        behind = model(ids[:, 6:], **{CACHE_ARGUMENT: cache}, output_attentions=True).attentions
    for layer, weights in enumerate(whole):
        assert weights.shape == (2, 4, 9, 18)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9))
        torch.testing.assert_close(some[layer], weights[:, :, [2, 7]], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(behind[layer], weights[:, :, 6:], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
def test_matrices_of_other_pairs_are_refused(is_causal: bool) -> None:
    model = build(is_causal=is_causal)
    matrix = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    matrix = matrix.tril() if is_causal else matrix
    matrix[0, 0, 4, 1] = False
    with pytest.raises(hea.InputError, match="other pairs of tokens than a padding mask"):
        model(random_ids(1, 6), attention_mask=matrix)


ROWS = [range(40), range(13, 40), range(1, 40)]


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and a mask of rows of these lengths, one of them with a hole of a whole span."""
    mask = torch.zeros(3, 40, dtype=torch.long)
    for row, columns in zip(mask, ROWS, strict=True):
        row[list(columns)] = 1
    mask[2, 9:17] = 0
    return random_ids(3, 40), mask


@pytest.mark.parametrize("chunk", [1, 20])
@pytest.mark.parametrize("is_static", [False, True])
@torch.no_grad()
def test_any_steps_equal_the_whole_text(chunk: int, is_static: bool) -> None:
    model = build(is_causal=True, num_nodes=1, clip_distance=3)
    ids, mask = left_padded()
    full = model(ids, attention_mask=mask, use_cache=False).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=45) if is_static else None
    found, real = decode(model, ids, [chunk] * (40 // chunk), cache, mask)[0], mask.bool()
    torch.testing.assert_close(found[real], full[real], atol=TOLERANCE, rtol=TOLERANCE)


def test_a_step_reads_as_many_nodes_as_the_tree_says() -> None:
    """About k · log2(n) of them, those that the pattern lists for the token."""
    config = hea.BPTransformerConfig(is_causal=True, num_nodes=3)
    for place in (0, 1, 6, 31, 32, 1000):
        real = torch.ones(1, place + 1, dtype=torch.bool)
        nodes = next_nodes(config.pattern, 2, torch.tensor(place), real, 1, False)
        assert nodes.read.shape[2] == 4 * (place + 1).bit_length()
        expected = config.pattern.num_keys_of(2 * place, 2 * place + 1) - 1
        assert int(nodes.is_read.sum()) == expected
        # the spans that end with this token
        assert nodes.sizes == tuple(2**level for level in range(1, 12) if (place + 1) % 2**level == 0)
    assert nodes.num_spans == 0


def test_caches_without_room_for_spans_are_refused() -> None:
    model = build(is_causal=True)
    with pytest.raises(hea.ConfigurationError, match="attention_pattern"):
        hea.PatternCache(model.config)
    cache = transformers.DynamicCache()
    for layer in range(2):
        cache.update(*torch.zeros(2, 1, 4, 3, 8).unbind(0), layer)
    with pytest.raises(hea.UnsupportedBackendError, match="keys with 4 heads"):
        model(random_ids(1, 2), **{CACHE_ARGUMENT: cache})
    sliding = transformers.DynamicCache(config=transformers.MistralConfig(sliding_window=4, num_hidden_layers=2))
    model(random_ids(1, 2), **{CACHE_ARGUMENT: sliding})
    with pytest.raises(hea.UnsupportedBackendError, match="DynamicSlidingWindowLayer"):
        model(random_ids(1, 2), **{CACHE_ARGUMENT: sliding})


PAIRS: dict[str, Any] = {"separate_sentences": True, "cross_layers": 2, "num_hidden_layers": 1, "num_nodes": 1}
PARTS = (6, 3)
TYPES = torch.tensor([[0] * 6 + [1] * 3])
HEAD = "AutoModelForSequenceClassification"


def test_states_and_gradients_of_pairs_are_those_of_the_specification() -> None:
    model, ids = build("AutoModel", **PAIRS).double(), random_ids(1, 9)
    found = model(ids, token_type_ids=TYPES)
    weights = dict(model.named_parameters())
    expected = pair_by_nodes(model.config, weights, weights["embed_tokens.weight"][ids[0]].split(PARTS))
    tokens, roots = (torch.cat([each[place].view(-1, 32) for each in expected]) for place in (0, 1))
    torch.testing.assert_close(found.last_hidden_state[0], tokens, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(found.root_states[0], roots, atol=1e-12, rtol=1e-9)
    assert found.pooler_output is None
    named = {name: each for name, each in weights.items() if not name.startswith("embed_tokens")}
    totals = [
        (states * torch.arange(states.numel()).view_as(states).sin()).sum()
        for states in (torch.cat((found.last_hidden_state[0], found.root_states[0])), torch.cat((tokens, roots)))
    ]
    own, other = (torch.autograd.grad(each, list(named.values()), allow_unused=True) for each in totals)
    for name, one, wanted in zip(named, own, other, strict=True):
        wanted = torch.zeros_like(one) if wanted is None else wanted
        torch.testing.assert_close(one, wanted, atol=1e-10, rtol=1e-8, msg=name)


@pytest.mark.parametrize("pooling", ["root", "first", "last", "mean"])
@torch.no_grad()
def test_padding_and_batch_mates_change_nothing(pooling: str) -> None:
    model = build(HEAD, **PAIRS, classifier_pooling=pooling, classifier_head="dense")
    ids, mate = random_ids(1, 9), random_ids(1, 12, seed=3)
    plain = model(ids, token_type_ids=TYPES).logits
    for before, behind in ((3, 0), (0, 3)):
        padded, kinds, mask = (pad(each, (before, behind)) for each in (ids, TYPES, torch.ones_like(ids)))
        rows = {"input_ids": torch.cat((padded, mate)), "attention_mask": pad(mask, (0, 0, 0, 1), value=1)}
        types = torch.cat((kinds, torch.tensor([[0] * 4 + [1] * 8])))
        found = model(**rows, token_type_ids=types).logits[:1]
        torch.testing.assert_close(found, plain, atol=TOLERANCE, rtol=TOLERANCE)
    changed = torch.cat((ids[:, :8], ids[:, 8:] % 50 + 5), 1)
    assert not torch.allclose(model(changed, token_type_ids=TYPES).logits, plain, atol=1e-4)


@torch.no_grad()
def test_without_layers_across_sentences_are_as_alone() -> None:
    model, ids = build("AutoModel", separate_sentences=True), random_ids(1, 9)
    pair = model(ids, token_type_ids=TYPES)
    for number, part in enumerate((slice(6), slice(6, None))):
        # a pair with an empty sentence, which has no root
        alone = model(ids[:, part], token_type_ids=torch.full_like(ids[:, part], number))
        torch.testing.assert_close(pair.last_hidden_state[:, part], alone.last_hidden_state)
        torch.testing.assert_close(pair.root_states[:, number], alone.root_states[:, number])
        assert (alone.root_states[:, 1 - number] == 0).all()


def test_pairs_must_be_told_apart() -> None:
    model, ids = build("AutoModel", **PAIRS), random_ids(2, 6)
    with pytest.raises(hea.InputError, match="token_type_ids"):
        model(ids)
    with pytest.raises(hea.InputError, match="row 1 change 2 times"):
        model(ids, token_type_ids=torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]]))
    with pytest.raises(hea.InputError, match="other than 0, but this model takes no pairs"):
        build("AutoModel")(ids, token_type_ids=torch.ones_like(ids))


def test_every_parameter_of_the_preset_trains() -> None:
    """Under DDP, each needs a gradient."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 61}
    model = hea.BPTransformerForSequenceClassification(hea.BPTransformerConfig.snli(**sizes)).train()
    model(random_ids(1, 9), token_type_ids=TYPES, labels=torch.tensor([2])).loss.backward()
    assert [name for name, each in model.named_parameters() if each.grad is None] == []
    assert model.classifier.out_proj.weight.shape == (3, 24)


# the authors name 38 and 39 million
SIZES = [("enwik8", 903, 38_629_632), ("text8", 903, 38_512_384), ("sst5", 15, 2_968_800), ("imdb", 54, 3_701_400)]


@pytest.mark.parametrize(("preset", "relations", "parameters"), SIZES)
def test_presets_have_the_parameters_of_their_shapes(preset: str, relations: int, parameters: int) -> None:
    config = getattr(hea.BPTransformerConfig, preset)()
    with torch.device("meta"):
        model = hea.BPTransformerModel(config)
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = 4 * hidden**2 + 2 * hidden * inner + inner + hidden + 4 * hidden + relations * config.head_dim
    total = config.num_hidden_layers * layer + config.vocab_size * hidden + 2 * hidden
    assert model.num_parameters() == total == parameters


@pytest.mark.parametrize("pooling", ["root", "first", "last", "mean"])
def test_classifiers_read_what_the_config_says(pooling: str) -> None:
    model, ids = build("AutoModelForSequenceClassification", classifier_pooling=pooling), random_ids(2, 7)
    with torch.no_grad():
        states = model.model(ids)
        tokens = states.last_hidden_state
        # of seven tokens, the span of eight, whose left half ends with the fourth
        read = {"root": states.span_states[:, 3], "first": tokens[:, 0], "last": tokens[:, -1], "mean": tokens.mean(1)}
        torch.testing.assert_close(model(ids).logits, model.classifier(read[pooling]))


def test_a_row_of_several_documents_has_no_root() -> None:
    model = build("AutoModelForSequenceClassification")
    with pytest.raises(hea.InputError, match="Pass one whole text in each row"):
        model(random_ids(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


FIELDS: dict[str, Any] = {"is_causal": True, "layer_losses": True, "num_hidden_layers": 4}


@pytest.mark.filterwarnings("ignore:The training loss does not include auxiliary_loss:UserWarning")
@pytest.mark.parametrize(("progress", "predicting"), [(0.0, 4), (0.25, 3), (0.6, 2), (1.0, 1)])
def test_the_loss_is_the_mean_of_the_layers_that_predict(progress: float, predicting: int) -> None:
    model, ids = build("AutoModelForCausalLM", **FIELDS).train(), random_ids(2, 9)
    labels = ids.clone()
    labels[0, 6:] = -100
    model.model.progress = progress
    states = model(ids, output_hidden_states=True).hidden_states[1:]
    losses = [model.loss_function(model.lm_head(each), labels, model.config.vocab_size) for each in states]
    expected = torch.stack(losses[-predicting:]).mean()
    found = model(ids, labels=labels)
    torch.testing.assert_close(found.loss, expected)
    # Trainer divides by the tokens of all batches of a step
    shared = model(ids, labels=labels, num_items_in_batch=2 * (labels[:, 1:] != -100).sum())
    torch.testing.assert_close(shared.loss, expected / 2)
    gradients = [torch.autograd.grad(each, list(model.parameters())) for each in (found.loss, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    evaluated = model.eval()(ids, labels=labels)
    assert evaluated.auxiliary_loss is None
    torch.testing.assert_close(evaluated.loss, losses[-1])


def test_a_micro_batch_without_labels_has_no_loss() -> None:
    """As of every model: one of several that make a step may have none that count."""
    model, ids = build("AutoModelForCausalLM", **FIELDS).train(), random_ids(2, 9)
    loss = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=torch.tensor(5)).loss
    assert loss == 0
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_callback_says_how_much_of_the_training_is_over(tmp_path: Path) -> None:
    model, seen = build("AutoModelForCausalLM", **FIELDS), []
    model.model.register_forward_pre_hook(lambda module, _: seen.append(module.progress))
    rows = Dataset.from_dict({"input_ids": random_ids(4, 6).tolist(), "labels": random_ids(4, 6).tolist()})
    args = trainer_arguments(tmp_path, max_steps=4, per_device_train_batch_size=2)
    callbacks = [hea.LayerLossCallback(), hea.AuxiliaryLossCallback()]
    Trainer(model, args, train_dataset=rows, callbacks=callbacks).train()
    assert seen == [0.0, 0.25, 0.5, 0.75]
    other = build("AutoModelForCausalLM", is_causal=True)
    with pytest.raises(hea.InputError, match="does not compute losses of layers"):
        Trainer(other, args, train_dataset=rows, callbacks=[hea.LayerLossCallback()]).train()
