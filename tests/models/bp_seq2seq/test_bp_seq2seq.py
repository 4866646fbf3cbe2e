"""Translation by its specification, node by node; of documents whose sentences are aligned, sentence by sentence."""

from typing import Any

import pytest
import torch
from families import BY_NAME
from models.bp_transformer.tree_by_nodes import tree_by_nodes
from seq2seq_cases import TINY, random_ids
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.attention import functional
from hf_efficient_attn.backends import reference, sdpa
from hf_efficient_attn.models.encoder_decoder import stacks

Masks = tuple[list[bool], list[bool]]

# which tokens of a source, and of a target, are no padding
SOURCE = [False, False, True, True, True, False, True, True, True, True, True]
TARGET = [False, True, True, True, True, True, True, False, False]
MASKS: list[Masks] = [([True] * 11, [True] * 9), (SOURCE, TARGET)]


def embedded(stack: dict[str, Tensor], table: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """Return the embeddings of a row with their positions, which count real tokens."""
    positions = stack.get("embeddings.positions.table.weight")
    added = 0 if positions is None else positions[(real.cumsum(0) - 1).clamp(min=0)]
    return table[ids[0]] + added


def translated(
    model: Any, source: Tensor, target: Tensor, masks: Masks, sentences: tuple[list[int], list[int]] | None
) -> Tensor:
    """Return the states of the real target tokens, node by node, [T, hidden_size].

    sentences: the numbers of those of the source and of the target; None: every target token reads every source token.
    """
    weights, found = dict(model.named_parameters()), None
    for side, ids, mask in zip(("encoder", "decoder"), (source, target), masks, strict=True):
        stack = {name.removeprefix(f"{side}."): each for name, each in weights.items() if name.startswith(side)}
        first, last = mask.index(True), len(mask) - mask[::-1].index(True)
        real, reads = torch.tensor(mask), None
        rows = embedded(stack, weights["embed_tokens.weight"], ids, real)[first:last]
        if side == "decoder" and sentences is not None:
            kept = [number for number, is_real in zip(sentences[0], masks[0], strict=True) if is_real]
            reads = [[key for key, each in enumerate(kept) if each == own] for own in sentences[1][first:last]]
        states, _ = tree_by_nodes(model.config, stack, rows, mask[first:last], side == "decoder", found, reads)
        found = states[real[first:last]]
    return found


def check_translation(
    model: Any, masks: Masks, sentences: tuple[list[int], list[int]] | None = None, **inputs: Tensor
) -> None:
    """Compare the states of a model in float64, and their gradients, with those of the specification.

    inputs: of the model, besides tokens and masks.
    """
    source, target = random_ids(1, 11), random_ids(1, 9, seed=4)
    read, written = (torch.tensor(mask)[None] for mask in masks)
    states = model(source, read.long(), target, written.long(), use_cache=False, **inputs).last_hidden_state[written]
    expected = translated(model, source, target, masks, sentences)
    torch.testing.assert_close(states, expected, atol=1e-12, rtol=1e-9)
    named = {name: each for name, each in model.named_parameters() if "embed" not in name}
    signs = torch.arange(states.numel()).view_as(states).sin()
    wanted = torch.autograd.grad((expected * signs).sum(), list(named.values()), allow_unused=True)
    found = torch.autograd.grad((states * signs).sum(), list(named.values()))
    for key, one, other in zip(named, found, wanted, strict=True):
        other = torch.zeros_like(one) if other is None else other
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8, msg=key)
    if sentences is not None:
        whole = model(source, read.long(), target, written.long(), use_cache=False)
        assert not torch.allclose(states, whole.last_hidden_state[written])


@pytest.mark.parametrize("masks", MASKS, ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["bp-seq2seq", "bp-seq2seq-positions"])
def test_states_and_gradients_are_those_of_the_specification(name: str, masks: Masks) -> None:
    check_translation(BY_NAME[name].model("AutoModel").double(), masks)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_prompts_padded_on_either_side_generate_the_same(num_beams: int) -> None:
    """Their padding comes first; behind it stand the start token and the prompt."""
    model, ids = BY_NAME["bp-seq2seq"].model(), random_ids(2, 9)
    prompts = torch.tensor([[START, 0, 0, 5, 6], [START, 7, 8, 0, 0]])
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": num_beams}
    found = model.generate(ids, decoder_input_ids=prompts, decoder_attention_mask=(prompts > 0).long(), **options)
    assert found[:, :5].tolist() == [[0, 0, START, 5, 6], [0, 0, START, 7, 8]]
    for row, prompt in enumerate(([START, 5, 6], [START, 7, 8])):
        alone = model.generate(ids[row : row + 1], decoder_input_ids=torch.tensor([prompt]), **options)
        assert torch.equal(found[row, 2:], alone[0])


def test_spans_of_the_target_pass_on_what_tokens_have_read_of_the_source() -> None:
    """So far tokens know of the source by two ways, and a single layer has one."""
    model, target = BY_NAME["bp-seq2seq"].model("AutoModel"), random_ids(1, 9)
    seen: list[Tensor] = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda layer, args, out: seen.append(out[1]))
    with torch.no_grad():
        for seed in (1, 2):
            model(random_ids(1, 7, seed), decoder_input_ids=target)
    first, second, first_of_other, second_of_other = seen
    torch.testing.assert_close(first, first_of_other)
    # the span behind the first token exists, and has two tokens
    assert not torch.allclose(second[:, 0], second_of_other[:, 0], atol=1e-3)


def test_presets_have_the_parameters_of_their_shapes() -> None:
    config = hea.BPSeq2SeqConfig.wmt14(vocab_size=37_000)
    with torch.device("meta"):
        model = hea.BPSeq2SeqForConditionalGeneration(config)
    hidden, inner = config.hidden_size, config.intermediate_size
    # 2k + 1 of a level, of tokens, pairs and all larger spans
    relations = 9 * 3 * config.head_dim
    layer = 4 * hidden**2 + 2 * hidden * inner + inner + hidden + 4 * hidden
    both = 12 * (layer + relations) + 6 * (4 * hidden**2 + 2 * hidden) + 4 * hidden
    assert model.num_parameters() == both + 37_000 * hidden


# the source comes back to sentence 3, which the target reads whole, twice; it has no 8, and nothing reads its 5
PAIRED = ([3, 3, 3, 4, 4, 5, 5, 6, 6, 3, 3], [3, 3, 6, 6, 4, 4, 3, 8, 8])
# of a source and of its translation
LENGTHS, PADDED = ((16, 10, 40, 24), (20, 8, 50, 30)), ((10, 25), (30, 11))


def build(**fields: Any) -> Any:
    return BY_NAME["bp-seq2seq"].model("AutoModelForSeq2SeqLM", **fields)


@pytest.mark.parametrize("masks", MASKS, ids=["whole", "padded"])
@pytest.mark.parametrize("backend", ["blocked", "sdpa", "reference"])
def test_states_and_gradients_of_aligned_sentences(backend: str, masks: Masks) -> None:
    model = BY_NAME["bp-seq2seq"].model("AutoModel").double()
    named = zip(("sentence_ids", "decoder_sentence_ids"), PAIRED, strict=True)
    with hea.use_backend(backend):
        check_translation(model, masks, PAIRED, **{name: torch.tensor([each]) for name, each in named})


def document(lengths: tuple[tuple[int, ...], ...], sizes: tuple[int, int], side: str) -> dict[str, Tensor]:
    """Return a row of sentences of so many tokens, with padding that has numbers of sentences, too."""
    found = {}
    names = ("input_ids", "attention_mask", "sentence_ids")
    for side_of, own, size in zip(("", "decoder_"), lengths, sizes, strict=True):
        ids, mask, numbers = (f"{side_of}{name}" for name in names)
        count = size - sum(own)
        row = torch.repeat_interleave(torch.arange(len(own)), torch.tensor(own))
        found[ids] = random_ids(1, size, seed=size + count)
        for name, tokens, padding in ((mask, torch.ones_like(row), 0), (numbers, row, 1)):
            filled = torch.full((count,), padding)
            found[name] = torch.cat((filled, tokens) if side == "left" else (tokens, filled))[None]
    return found


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_documents_compute_no_other_pairs(side: str, monkeypatch: Any) -> None:
    """Two rows of unequal numbers of sentences, one of them padded, as the dense model in float64 has them."""
    sizes = (sum(LENGTHS[0]), sum(LENGTHS[1]))
    rows = [document(LENGTHS, sizes, side), document(PADDED, sizes, side)]
    inputs = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    real, found = inputs["decoder_attention_mask"].bool(), []
    model = build(max_target_position_embeddings=512, max_position_embeddings=512).double()
    # as if documents always paid
    monkeypatch.setattr(functional, "WORK_PER_DOCUMENT", 0)
    for backend in ("reference", "auto"):
        with hea.use_backend(backend):
            logits = model(**inputs, use_cache=False).logits[real]
        loss = (logits * torch.arange(logits.numel()).view_as(logits).sin()).sum()
        found.append((logits.detach(), *torch.autograd.grad(loss, [*model.model.decoder.layers.parameters()])))
        # what computes all pairs is not called
        monkeypatch.setattr(sdpa, "attend", None)
        monkeypatch.setattr(reference, "attend", None)
        monkeypatch.delattr(stacks, "dense_attention", raising=False)
    for exact, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"use_cache": True}, {"cache_implementation": "static"}])
def test_generation_reads_sentences_one_by_one(options: dict[str, Any]) -> None:
    """As all pairs under a mask, without a cache."""
    model = build(eos_token_id=None)
    ids, numbers = random_ids(2, 11), torch.tensor([PAIRED[0], [0] * 4 + [1] * 7])
    given: dict[str, Any] = {"sentence_ids": numbers, "max_new_tokens": 6, "do_sample": False}
    beams = {"num_beams": options.get("num_beams", 1)}
    model.config.sentence_end_token_id = int(model.generate(ids, **given)[0, 2])
    with hea.use_backend("blocked"):
        found = model.generate(ids, **given, **options)
    with hea.use_backend("reference"):
        expected = model.generate(ids, **given, **beams, use_cache=False)
    assert torch.equal(found, expected)


START, END, NEW_TOKENS = TINY["decoder_start_token_id"], 7, 6
SENTENCES = [3] * 4 + [5] * 2 + [4] * 5
# the second sentence of the source comes last
OF_TARGET = [3] * 3 + [4] * 4 + [5] * 2


def sentences(rows: int = 1) -> dict[str, Tensor]:
    named = {"sentence_ids": SENTENCES, "decoder_sentence_ids": OF_TARGET}
    return {name: torch.tensor([numbers] * rows) for name, numbers in named.items()}


def test_one_sentence_is_the_whole_source() -> None:
    model, ids, target = build(), random_ids(2, 11), random_ids(2, 9)
    one = {name: torch.full_like(each, 4) for name, each in sentences(2).items()}
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids, decoder_input_ids=target, **one).logits, model(ids, decoder_input_ids=target).logits
        )


@pytest.mark.filterwarnings("ignore:output_attentions=True")
def test_a_sentence_that_the_source_has_not_reads_nothing_across() -> None:
    model, inputs = build(), sentences()
    inputs["decoder_sentence_ids"][0, 5:] = 9
    out = model(random_ids(1, 11), decoder_input_ids=random_ids(1, 9), output_attentions=True, **inputs)
    allowed = inputs["decoder_sentence_ids"][0][:, None] == inputs["sentence_ids"][0]
    for weights in out.cross_attentions:
        assert ((weights[0] > 0) == allowed).all()
        torch.testing.assert_close(weights[0].sum(-1), allowed.any(-1).float().expand(weights.shape[1], -1))
    out.logits.sum().backward()
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())


def by_hand(model: Any, ids: Tensor, numbers: Tensor, prompt: list[int], of_prompt: list[int]) -> list[int]:
    """Return the greedy translation of one text without a cache, each token's sentence counted."""
    written, of_written = list(prompt), list(of_prompt)
    for _ in range(NEW_TOKENS):
        given = {"decoder_input_ids": torch.tensor([written]), "decoder_sentence_ids": torch.tensor([of_written])}
        with torch.no_grad():
            logits = model(ids, sentence_ids=numbers, use_cache=False, **given).logits
        written.append(int(logits[0, -1].argmax()))
        of_written.append(of_written[-1] + (written[-1] == model.config.sentence_end_token_id))
    return written


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("given", [False, True])
def test_generation_goes_on_to_the_next_sentence(given: bool, cache: str | None) -> None:
    """Prompts padded on either side; without numbers of theirs, they begin with the first sentence of the source."""
    model, ids, mask = build(eos_token_id=None), random_ids(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[0, :2] = 0
    numbers = torch.tensor([[9] * 2 + [1] * 3 + [2] * 3 + [3] * 3, [0] * 4 + [1] * 4 + [2] * 3])
    prompts = torch.tensor([[START, 0, 0, 5, 6], [START, 8, 9, 0, 0]])
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": mask}
    options |= {"sentence_ids": numbers, "use_cache": cache is not None, "decoder_input_ids": prompts}
    options |= {"decoder_attention_mask": (prompts > 0).long()} | ({"cache_implementation": cache} if cache else {})
    if given:
        options["decoder_sentence_ids"] = torch.tensor([[2, 9, 9, 2, 3], [0, 1, 1, 9, 9]])
    before = model.generate(ids, **options)
    # what the second row writes first ends a sentence, and so does the end of its prompt
    model.config.sentence_end_token_id = end = int(before[1, 5])
    if not given:
        prompts[1, 2] = end
    found = model.generate(ids, **options)
    for row, prompt in enumerate(([START, 5, 6], [START, 8, int(prompts[1, 2])])):
        own = [[2, 2, 3], [0, 1, 1]][row] if given else [[1, 1, 1], [0, 0, 1]][row]
        kept = mask[row].bool()
        assert found[row, 2:].tolist() == by_hand(
            model, ids[row : row + 1, kept], numbers[row : row + 1, kept], prompt, own
        )
    assert given is False or not torch.equal(found, before)


def test_beams_and_a_prompt_without_a_start_token() -> None:
    """Whose beams all have the numbers of their prompt; the start token has that of the first."""
    model = build(eos_token_id=None, sentence_end_token_id=END)
    ids, numbers = random_ids(2, 11), torch.tensor([SENTENCES] * 2)
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 5, "do_sample": False, "sentence_ids": numbers}
    prompt, of_prompt = torch.tensor([[5, 6]] * 2), torch.tensor([[3, 4]] * 2)
    found = model.generate(ids, decoder_input_ids=prompt, decoder_sentence_ids=of_prompt, **options)
    whole = torch.cat((torch.full((2, 1), START), prompt), 1)
    of_whole = torch.tensor([[3, 3, 4]] * 2)
    assert torch.equal(
        found, model.generate(ids, decoder_input_ids=whole, decoder_sentence_ids=of_whole, use_cache=False, **options)
    )
    assert found.shape == (2, 8)


@pytest.mark.parametrize("of_padding", [0, -1, 7])
def test_a_start_token_has_the_number_of_the_first_token_of_a_padded_prompt(of_padding: int) -> None:
    """Not that of the padding before it."""
    model, ids = build(eos_token_id=None), random_ids(2, 11)
    numbers = torch.tensor([SENTENCES] * 2)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    prompt = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])
    padded = model.generate(
        ids,
        sentence_ids=numbers,
        decoder_input_ids=prompt,
        decoder_sentence_ids=torch.tensor([[1, 1, 1, 2], [of_padding, of_padding, 3, 3]]),
        decoder_attention_mask=(prompt != 0).long(),
        **options,
    )
    alone = model.generate(
        ids[1:],
        sentence_ids=numbers[1:],
        decoder_input_ids=prompt[1:, 2:],
        decoder_sentence_ids=torch.tensor([[3, 3]]),
        **options,
    )
    for found, expected in zip(padded.logits, alone.logits, strict=True):
        torch.testing.assert_close(found[1], expected[0], atol=1e-5, rtol=1e-5)


def test_compiles() -> None:
    """The contract trains what is compiled, without numbers of sentences."""
    inputs = {"input_ids": random_ids(2, 11), "labels": random_ids(2, 9), **sentences(2)}
    model = build(encoder_layers=1, decoder_layers=1)
    torch.compiler.reset()
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend="eager")(**inputs, use_cache=False)
        torch.testing.assert_close(found.logits, model(**inputs, use_cache=False).logits)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sentence_ids": torch.zeros(2, 11).long()}, "sentence_ids is given without decoder_sentence_ids"),
        ({"sentence_ids": torch.zeros(2, 11)}, "sentence_ids has dtype torch.float32; it must hold integers"),
        (
            {"sentence_ids": [[0] * 11] * 2},
            r"sentence_ids is of type list; pass a tensor, such as torch.as_tensor\(sent",
        ),
        ({"decoder_sentence_ids": torch.zeros(9).long()}, r"has shape \[9\]; .* new target tokens\] = \[2, 9\]"),
    ],
)
def test_what_is_no_number_of_each_token(given: dict[str, Any], message: str) -> None:
    alone = "without" in message
    with pytest.raises(hea.InputError, match=message):
        build()(random_ids(2, 11), labels=random_ids(2, 9), **{**({} if alone else sentences(2)), **given})


def test_what_generate_refuses() -> None:
    model, ids, numbers = build(), random_ids(2, 11), torch.tensor([SENTENCES] * 2)
    options: dict[str, Any] = {"max_new_tokens": 2, "sentence_ids": numbers}
    with pytest.raises(hea.InputError, match="decoder_sentence_ids"):
        model.generate(ids, decoder_sentence_ids=numbers[:, :3], **options)
    with pytest.raises(hea.InputError, match="sentence_ids"):
        model.generate(ids, **{**options, "sentence_ids": numbers.float()})
    with pytest.raises(hea.InputError, match="sentence_ids"):
        model.generate(ids, **{**options, "sentence_ids": numbers.flatten()})
    with pytest.raises(hea.InputError, match="decoder_sentence_ids"):
        model.generate(ids, decoder_sentence_ids=numbers[:, :1], max_new_tokens=2)


def test_generate_goes_on_to_the_next_number_alone() -> None:
    model = build(sentence_end_token_id=END)
    ids, numbers = random_ids(1, 6), torch.tensor([[0, 0, 10, 10, 20, 20]])
    with pytest.raises(hea.InputError, match="row 0 has 3 different numbers from 0 to 20"):
        model.generate(ids, sentence_ids=numbers, max_new_tokens=2)
    # padding has no number
    padded = torch.tensor([[-9, -9, 3, 3, 4, 4]])
    model.generate(ids, attention_mask=(padded > 0).long(), sentence_ids=padded, max_new_tokens=2)
