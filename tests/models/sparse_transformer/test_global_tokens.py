"""Which tokens are global, by every rule and by a mask: in the forward pass, in generation, in collators."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models_cases import TINY, randomize
from tokenizers import Tokenizer, models, pre_tokenizers

import hf_efficient_attn as hea
from hf_efficient_attn import patterns
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT

pytestmark = pytest.mark.filterwarnings("ignore:output_attentions=True")


Config = hea.SparseTransformerConfig
SEP = 2


def weights_of(rule: Any, head: str = "Model", **inputs: Any) -> torch.Tensor:
    """Return which pairs an encoder of one layer reads, bool [B, T, T], as its attention weights show."""
    config = Config.sliding(
        **{**TINY, "left": 1, "num_hidden_layers": 1, "global_tokens": rule, "sep_token_id": SEP, "pad_token_id": 0}
    )
    model = randomize(getattr(hea, f"SparseTransformer{head}")(config).eval())
    with torch.no_grad():
        return model(**inputs, output_attentions=True).attentions[0][:, 0] > 0


def band(tokens: int) -> torch.Tensor:
    index = torch.arange(tokens)
    return (index[:, None] - index).abs() <= 1


def with_globals(tokens: int, positions: list[int]) -> torch.Tensor:
    allowed = band(tokens)
    allowed[positions] = True
    allowed[:, positions] = True
    return allowed


IDS = torch.tensor([[5, 6, 7, SEP, SEP, 8, 9, 10, SEP, 11]])


@pytest.mark.parametrize(
    ("rule", "positions"),
    [
        (None, []),
        ("first", [0]),
        ("question", [0, 1, 2]),
        ("choice", [5, 6, 7, 8, 9]),
        ({"positions": [2, 7]}, [2, 7]),
        ({"token_ids": [9, 5]}, [0, 6]),
        ({"every": 4}, [0, 4, 8]),
    ],
)
def test_rules(rule: Any, positions: list[int]) -> None:
    assert torch.equal(weights_of(rule, input_ids=IDS)[0], with_globals(10, positions))


@pytest.mark.parametrize(
    ("head", "positions"),
    [
        ("Model", []),
        ("ForMaskedLM", []),
        ("ForTokenClassification", []),
        ("ForSequenceClassification", [0]),
        ("ForQuestionAnswering", [0, 1, 2]),
    ],
)
def test_auto_follows_the_head(head: str, positions: list[int]) -> None:
    assert torch.equal(weights_of("auto", head, input_ids=IDS)[0], with_globals(10, positions))


def test_auto_of_multiple_choice() -> None:
    pairs = weights_of("auto", "ForMultipleChoice", input_ids=IDS[:, None].expand(1, 2, -1))
    assert torch.equal(pairs[1], with_globals(10, [5, 6, 7, 8, 9]))


def test_mask_takes_the_place_of_the_rule_and_differs_by_example() -> None:
    chosen = torch.zeros(2, 10, dtype=torch.long)
    chosen[0, 4] = chosen[1, [1, 8]] = 1
    pairs = weights_of("first", input_ids=IDS.expand(2, -1), global_attention_mask=chosen)
    assert torch.equal(pairs[0], with_globals(10, [4]))
    assert torch.equal(pairs[1], with_globals(10, [1, 8]))


def formula(layer: Any, hidden: torch.Tensor, allowed: torch.Tensor, is_global: torch.Tensor) -> torch.Tensor:
    """Return a layer's attention over the allowed pairs [H, T, T]; global tokens read by their own projections."""
    out = []
    for maps in (layer, layer.global_attention or layer):
        query, key, value = (
            projection(hidden).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
            for projection in (maps.q_proj, maps.k_proj, maps.v_proj)
        )
        scores = (query @ key.transpose(2, 3) * layer.head_dim**-0.5).masked_fill(~allowed, -torch.inf)
        out.append((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
    return layer.o_proj(torch.where(is_global[:, None], out[1], out[0]))


ONE_SIDED = patterns.Band(4, 0)
OF_HEADS = patterns.PerHead([ONE_SIDED, patterns.Band(1, 0)] * 2)
UNLIKE = patterns.PerHead([ONE_SIDED, patterns.Band(1, 1)] * 2)
WAYS = ("positions", "token_ids", "mask", "pattern")


@pytest.mark.parametrize("projections", [False, True])
@pytest.mark.parametrize("pattern", [ONE_SIDED, patterns.Band(4, 1), OF_HEADS, UNLIKE, None])
@pytest.mark.parametrize("is_causal", [False, True])
def test_however_they_are_named_global_tokens_read_and_are_read(
    is_causal: bool, pattern: Any, projections: bool
) -> None:
    """By everything; in a causal model, by what follows. A pattern that looks back only makes no encoder causal."""
    chosen, tokens = [5, 20], 24
    ids = torch.randint(3, 60, (1, tokens), generator=torch.Generator().manual_seed(1)).clamp(max=50)
    ids[:, chosen] = 55
    marks = torch.zeros_like(ids).index_fill_(1, torch.tensor(chosen), 1)
    index, is_global = torch.arange(tokens), marks[0].bool()
    heads = [(pattern or patterns.Full()).heads(4)[head].allowed(index[:, None], index) for head in range(4)]
    allowed = torch.stack(heads) | is_global | is_global[:, None]
    allowed = allowed & (index <= index[:, None]) if is_causal else allowed
    seen: list[Any] = []
    rules = {"positions": {"positions": chosen}, "token_ids": {"token_ids": [55]}}
    for way in WAYS[: 3 if projections or pattern is None else 4]:
        followed = pattern | patterns.GlobalTokens(chosen) if way == "pattern" else pattern
        fields = {**TINY, "num_hidden_layers": 1, "attention_pattern": followed, "global_tokens": rules.get(way)}
        config = Config(**fields, is_causal=is_causal, global_projections=projections, position_embedding_type="none")
        model = randomize(hea.SparseTransformerModel(config).eval()).double()
        seen.clear()
        model.layers[0].self_attn.register_forward_hook(lambda _, given, out: seen.append((given[0], out[0])))
        given = {"global_attention_mask": marks} if way == "mask" else {}
        with torch.no_grad():
            whole = model(ids, **given).last_hidden_state
            expected = formula(model.layers[0].self_attn, seen[0][0], allowed, is_global)
        torch.testing.assert_close(seen[0][1], expected)
        if is_causal and way != "token_ids":
            cache = transformers.DynamicCache(config=config)
            steps = []
            for first, stop in ((0, 10), (10, 21), (21, 22), (22, 24)):
                part = {name: mask[:, :stop] for name, mask in given.items()}
                # a rule names positions that the first part does not have yet
                if way == "positions":
                    part = {"global_attention_mask": marks[:, :stop]}
                with torch.no_grad():
                    steps.append(model(ids[:, first:stop], cache=cache, **part).last_hidden_state)
            torch.testing.assert_close(torch.cat(steps, 1), whole)


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_count_from_the_first_token(side: str) -> None:
    ids = torch.nn.functional.pad(IDS, (3, 0) if side == "left" else (0, 3))
    pairs = weights_of({"positions": [0, 2]}, input_ids=ids, attention_mask=(ids != 0).long())[0]
    pairs = pairs[3:, 3:] if side == "left" else pairs[:10, :10]
    assert torch.equal(pairs, with_globals(10, [0, 2]))


def test_padding_that_looks_like_the_separator_ends_no_question() -> None:
    config = Config.sliding(
        **{**TINY, "left": 1, "global_tokens": "question", "sep_token_id": SEP, "pad_token_id": SEP}
    )
    model = randomize(hea.SparseTransformerForQuestionAnswering(config).eval())
    padded = torch.nn.functional.pad(IDS, (3, 0), value=SEP)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    with torch.no_grad():
        alone, together = model(IDS).start_logits, model(padded, attention_mask=mask).start_logits[:, 3:]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", [{"token_ids": list(range(20, 40))}, "mask"])
@pytest.mark.parametrize("projections", [False, True])
def test_generation_knows_global_tokens(rule: Any, projections: bool) -> None:
    config = Config.longformer(
        **{**TINY, "attention_window": 4, "global_projections": projections},
        is_causal=True,
        global_tokens=None if rule == "mask" else rule,
    )
    model = randomize(hea.SparseTransformerForCausalLM(config).eval())
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    if rule == "mask":
        options["global_attention_mask"] = torch.zeros_like(ids)
        options["global_attention_mask"][:, [4, 6]] = 1
    for more in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        cached = model.generate(ids, **options, **more)
        more.pop("cache_implementation", None)
        assert torch.equal(cached, model.generate(ids, **options, **more, use_cache=False))


def test_mask_of_the_prompt_counts_while_generating() -> None:
    config = Config.longformer(**{**TINY, "attention_window": 2, "num_hidden_layers": 1}, is_causal=True)
    model = randomize(hea.SparseTransformerForCausalLM(config).eval())
    ids = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(3))
    chosen = torch.zeros_like(ids)
    chosen[:, :6] = 1
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    options["return_dict_in_generate"] = True
    with_globals_, without = (
        model.generate(ids, global_attention_mask=chosen, **options),
        model.generate(ids, **options),
    )
    assert not torch.allclose(with_globals_.logits[-1], without.logits[-1], atol=1e-3)


def test_what_is_refused() -> None:
    padded = torch.nn.functional.pad(IDS, (3, 0))
    mask = (padded != 0).long()
    first = torch.zeros_like(padded)
    first[:, 0] = 1
    with pytest.raises(hea.InputError, match="only padding in example 0"):
        weights_of(None, input_ids=padded, attention_mask=mask, global_attention_mask=first)
    with pytest.raises(hea.InputError, match=r"has shape \[1, 13\]; .*must be a tensor, \[batch, tokens\] = \[1, 10\]"):
        weights_of(None, input_ids=IDS, global_attention_mask=first)
    with pytest.raises(hea.InputError, match="separately from attention_mask"):
        weights_of(None, input_ids=IDS, global_attention_mask=IDS)
    with pytest.raises(hea.InputError, match="position 10, but a text ends at position 9"):
        weights_of({"positions": [10]}, input_ids=IDS)
    with pytest.raises(hea.InputError, match="sep_token_id=2"):
        weights_of("question", input_ids=torch.cat([IDS, IDS.clamp(min=3)]))
    with pytest.raises(hea.InputError, match="inputs_embeds"):
        weights_of("question", inputs_embeds=torch.randn(1, 4, TINY["hidden_size"]))


@pytest.mark.parametrize("padding", [(0, 3), (3, 0), None])
def test_position_beyond_the_tokens_of_one_row_is_refused(padding: tuple[int, int] | None) -> None:
    """The longer row has position 11; the other one ends at 9, with padding or packed before another."""
    ids, position = torch.cat((IDS, IDS + 30), 1), {"positions": [0, 11]}
    if padding is None:
        inputs = {"input_ids": ids, "position_ids": torch.arange(10).repeat(2)[None]}
    else:
        short = torch.nn.functional.pad(IDS, padding)
        mask = torch.cat((torch.ones(1, 13), (short != 0).long()))
        inputs = {"input_ids": torch.cat((ids[:, :13], short)), "attention_mask": mask}
    with pytest.raises(hea.InputError, match=f"position 11, but a text of example {int(padding is not None)} ends at"):
        weights_of(position, **inputs)


def test_row_that_is_all_padding_has_no_positions_to_miss() -> None:
    mask = torch.tensor([[1], [0]]).expand(-1, 10)
    pairs = weights_of({"positions": [7]}, input_ids=IDS.expand(2, -1), attention_mask=mask)
    assert torch.equal(pairs[0], with_globals(10, [7]))


def test_last_positions_and_tokens_are_allowed() -> None:
    Config(**TINY, global_tokens={"positions": [63]}, attention_pattern=patterns.GlobalTokens([-64, 63]))
    Config(**TINY, global_tokens={"token_ids": [60]}, attention_pattern=patterns.Blocks(patterns.GlobalTokens([7]), 8))


OPTIONS = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def causal_model(**fields: Any) -> Any:
    config = hea.SparseTransformerConfig.longformer(**{**TINY, "attention_window": 8, **fields}, is_causal=True)
    return randomize(hea.SparseTransformerForCausalLM(config).eval())


def prompt(tokens: int = 30) -> torch.Tensor:
    return torch.randint(3, 60, (2, tokens), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("rule", [None, "first", {"positions": [0, 1]}])
@pytest.mark.parametrize("padding", [0, 3])
def test_pattern_cache_gives_what_the_default_cache_gives(rule: Any, padding: int) -> None:
    model, ids = causal_model(global_tokens=rule), prompt()
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    cache = hea.PatternCache(model.config)
    small = model.generate(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **OPTIONS)
    assert torch.equal(small, model.generate(ids, attention_mask=mask, **OPTIONS))
    num_globals = {None: 0, "first": 1}.get(rule, 2) if not isinstance(rule, dict) else 2
    assert cache.layers[0].keys.shape[2] <= 4 + num_globals


def test_pattern_cache_refuses_what_it_cannot_hold() -> None:
    for fields in (
        {"global_tokens": {"every": 5}},
        {"global_tokens": {"token_ids": [7]}},
        {"global_tokens": "first", "global_projections": True},
    ):
        with pytest.raises(hea.ConfigurationError, match="PatternCache"):
            hea.PatternCache(causal_model(**fields).config)
    with pytest.raises(hea.ConfigurationError):
        hea.PatternCache(causal_model(global_tokens={"positions": [0, 7]}).config)
    model, ids = causal_model(), prompt()
    chosen = torch.zeros_like(ids)
    chosen[:, 0] = 1
    cache = hea.PatternCache(model.config)
    with pytest.raises(hea.InputError, match="Generate with the default cache"):
        model.generate(ids, global_attention_mask=chosen, **{CACHE_ARGUMENT: cache}, **OPTIONS)


def test_prompt_as_embeddings_with_a_mask_of_global_tokens() -> None:
    model, ids = causal_model(global_tokens="first"), prompt(12)
    more = {"attention_mask": torch.ones_like(ids), "global_attention_mask": torch.zeros_like(ids)}
    more["global_attention_mask"][:, 3] = 1
    expected = model.generate(ids, **more, **OPTIONS)[:, 12:]
    assert torch.equal(model.generate(inputs_embeds=model.get_input_embeddings()(ids), **more, **OPTIONS), expected)


CARD = Path(__file__).parents[3] / "model_cards" / "sparse_transformer.md"
ROWS = [{"input_ids": [4] * tokens, "global_attention_mask": [1] + [0] * (tokens - 1)} for tokens in (2, 4)]


def tokenizer(padding_side: str) -> Any:
    raw = Tokenizer(models.WordLevel({"[PAD]": 0, "[MASK]": 1, "[UNK]": 2, "w": 4}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "mask_token": "[MASK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, padding_side=padding_side, **special)


@pytest.mark.parametrize("name", ["DataCollatorWithPadding", "DataCollatorForLanguageModeling"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_collator_of_the_card(name: str, side: str) -> None:
    stock = getattr(transformers, name)(tokenizer(side))
    with pytest.raises(ValueError, match="Unable to create tensor"):
        stock(ROWS)
    (snippet,) = re.findall(r"```python\n(def collate.*?)```", CARD.read_text(), flags=re.DOTALL)
    scope = {"torch": torch, "collator": stock, "tokenizer": stock.tokenizer}
    exec(snippet, scope)
    batch = scope["collate"](ROWS)
    first = (batch["attention_mask"].cumsum(1) == 1) & batch["attention_mask"].bool()
    assert torch.equal(batch["global_attention_mask"], first.long())
