"""Tiny models of the families, and inputs for them; which there are, `families.py` says."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from hf_efficient_attn.models.register import HEADS
from hf_efficient_attn.models.spans.module import span_modules

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# how far two ways to the same numbers may be apart
TOLERANCE = 1e-5
# how fields of a config begin, and the head that reads them
HEAD_FIELDS = {
    "classifier_": "AutoModelForSequenceClassification",
    "sep_token_id": "AutoModelForQuestionAnswering",
    "global_tokens": "AutoModelForQuestionAnswering",
}


@dataclass(frozen=True)
class Case:
    """One configuration of one family: `config()` builds it, `heads` are the Auto heads it must have."""

    name: str
    config_class: type
    fields: tuple[tuple[str, Any], ...]
    # the cases that do take, together, every way from a model to a kernel
    shows_a_route: bool = False
    # whether it is compiled and exported, which takes seconds: not where its forward, with masks and without, and its
    # backward run no line of code that no other case runs
    is_traced: bool = True
    preset: str | None = None
    # other fields under which a token must read the same, too, whatever stands beside its text
    choices: tuple[dict[str, Any], ...] = ()

    def config(self, **changes: Any) -> transformers.PreTrainedConfig:
        build = self.config_class if self.preset is None else getattr(self.config_class, self.preset)
        return build(**{**TINY, **dict(self.fields), **changes})

    @property
    def fewest_layers(self) -> dict[str, int]:
        """The change to as few layers as its lists allow, for what takes its time by the layer."""
        return {} if any(isinstance(value, list) for _, value in self.fields) else {"num_hidden_layers": 1}

    @cached_property
    def is_causal(self) -> bool:
        return self.config().is_causal

    @property
    def heads(self) -> dict[str, type]:
        """Auto class name → model class, for every head this configuration can have."""
        prefix = self.config_class.__name__.removesuffix("Config")
        other = "MaskedLM" if self.is_causal else "CausalLM"
        classes = {head: getattr(hea, f"{prefix}For{head}", None) for head in HEADS if head != other}
        found = {f"AutoModelFor{head}": cls for head, cls in classes.items() if cls is not None}
        return {"AutoModel": getattr(hea, f"{prefix}Model"), **found}

    @property
    def main_head(self) -> str:
        """A language model, where the family has one of this direction; else a classifier."""
        wanted = "AutoModelForCausalLM" if self.is_causal else "AutoModelForMaskedLM"
        return wanted if wanted in self.heads else "AutoModelForSequenceClassification"

    def model(self, auto_class: str | None = None, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
        """Return a model in eval mode whose every parameter is random, so that no special start value hides a bug."""
        name = auto_class or self.main_head
        return built_once(self, lambda: self.heads[name](self.config(**changes)).eval(), name, seed, changes)

    def inputs(self, auto_class: str | None = None) -> dict[str, torch.Tensor]:
        """Return inputs with labels for one head; see `head_inputs`."""
        return head_inputs(auto_class or self.main_head)


def case_of(name: str, config_class: type, fields: dict[str, Any], preset: str | None = None) -> Case:
    """Return a case; `shows_a_route`, `is_traced` and `choices` are no fields of its config."""
    how = {flag: fields.pop(flag) for flag in ("shows_a_route", "is_traced", "choices") if flag in fields}
    return Case(name, config_class, tuple(fields.items()), preset=preset, **how)


_built: dict[str, Any] = {}


def built_once(case: Any, build: Callable[[], Any], name: str, seed: int, changes: dict[str, Any]) -> Any:
    """Return a copy of a random model of a case, with which tests may do as they like: a third of the time of building.

    Those of cases with changes, which few tests have in common, are built anew.
    """
    torch.manual_seed(seed)
    key = f"{case.name} {name} {seed}"
    if not changes and key not in _built:
        _built[key] = case, randomize(build(), seed)
    # a name may be that of another case in another file
    is_known = not changes and _built[key][0] is case
    model = copy.deepcopy(_built[key][1]) if is_known else randomize(build(), seed)
    # what a test draws does not depend on whether the model was built before
    torch.manual_seed(seed)
    return model


def randomize(model: torch.nn.Module, seed: int = 0) -> Any:
    """Move every parameter away from its start value, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim < 2 else 0.15
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    for spans in span_modules(model):
        spans.clamp_()
    return model


def parametrize_cases(metafunc: Any, cases: Sequence[Any], others_are_thorough: bool = False) -> None:
    """Give a test that asks for `case` every case, and one that asks for `auto_class`, too, each of its `tested_heads`.

    One that asks for `traced_case` gets those that are compiled and exported, and one that asks for `is_masked`, too,
    the `ways_to_export`. Thorough is what tracing adds: all but the first route of a family, exports without masks, and
    one of the two for each family: they are exported and compiled by turns.
    Where a test asks for `routed_case`, cases that show no route are thorough: it is about how a family is written, not
    about what a case computes; also for `case` if `others_are_thorough`.
    """
    first = {case.config_class: case for case in reversed(cases) if case.is_traced and case.shows_a_route}
    if "is_masked" in metafunc.fixturenames:
        exported = [*reversed(first.values())][::2]
        ways = [
            case_param(case, is_masked, name=f"{case.name}-{name}", is_thorough=not is_masked or case not in exported)
            for case, is_masked in ways_to_export(cases)
            for name in ["masked, with labels" if is_masked else "tokens alone"]
        ]
        metafunc.parametrize(("traced_case", "is_masked"), ways)
        return
    if "traced_case" in metafunc.fixturenames:
        compiled = [*reversed(first.values())][1::2]
        traced = [case_param(case, is_thorough=case not in compiled) for case in cases if case.is_traced]
        metafunc.parametrize("traced_case", traced)
    if "routed_case" in metafunc.fixturenames and "auto_class" not in metafunc.fixturenames:
        metafunc.parametrize("routed_case", [case_param(case, is_thorough=not case.shows_a_route) for case in cases])
    if "auto_class" in metafunc.fixturenames:
        of_family = {case.config_class: case for case in reversed(cases)}

        def is_repeated(case: Any, head: str) -> bool:
            """Return whether a head is one of the other direction's, and pools nothing."""
            own = (case.main_head, "AutoModelForSequenceClassification")
            return head not in own and case is not of_family[case.config_class] and not configures(case, head)

        fixture = "routed_case" if "routed_case" in metafunc.fixturenames else "case"
        others_are_thorough = others_are_thorough or fixture == "routed_case"
        pairs = [
            case_param(
                case,
                head,
                name=f"{case.name}-{head.removeprefix('AutoModel') or 'Base'}",
                is_thorough=(others_are_thorough and not case.shows_a_route) or is_repeated(case, head),
            )
            for case, head in tested_heads(cases)
        ]
        metafunc.parametrize((fixture, "auto_class"), pairs)
    elif "case" in metafunc.fixturenames:
        every = [case_param(case, is_thorough=others_are_thorough and not case.shows_a_route) for case in cases]
        metafunc.parametrize("case", every)


def case_param(case: Any, *others: Any, name: str = "", is_thorough: bool) -> Any:
    """Return what a test gets of a case, and of others."""
    return pytest.param(case, *others, id=name or case.name, marks=[pytest.mark.thorough] * is_thorough)


def tested_heads(cases: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """Yield (case, auto class): every head of the first case of each family and direction, and of others the main one.

    Heads are the same code on every backbone of a family; those that a case configures are tested with it, too.
    """
    complete: dict[Any, Any] = {}
    for case in cases:
        first = complete.setdefault((case.config_class, case.main_head), case)
        wanted = [head for head in case.heads if case is first or head == case.main_head or configures(case, head)]
        yield from ((case, head) for head in wanted)


def configures(case: Any, head: str) -> bool:
    """Return whether a case has fields of a head."""
    return any(name.startswith(field) and head == of for name, _ in case.fields for field, of in HEAD_FIELDS.items())


def ways_to_export(cases: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield (case, whether with masks and labels): both where a case shows a route, others of a family take turns.

    Every case is compiled with masks and labels, too, and computes without them in many tests.
    """
    turns: dict[Any, bool] = {}
    for case in (case for case in cases if case.is_traced):
        if case.shows_a_route:
            yield from ((case, True), (case, False))
        else:
            turns[case.config_class] = not turns.get(case.config_class, False)
            yield case, turns[case.config_class]


def switch_off_dropout(model: torch.nn.Module) -> None:
    """Set every dropout to 0, as TRL's `disable_dropout` does."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def checkpoint_activations(model: Any, *arguments: Any) -> None:
    """Switch gradient checkpointing on, which transformers 5.16 knew by an older name."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(*arguments)


def trainer_arguments(folder: Any, kind: Any = transformers.TrainingArguments, **changes: Any) -> Any:
    """Return arguments of Trainer on a CPU, without reports and checkpoints unless they are asked for."""
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    return kind(str(folder), **{**quiet, "dataloader_pin_memory": False, **changes})


def random_ids(rows: int, tokens: int, seed: int = 2) -> torch.Tensor:
    """Return tokens that are none of the special ones."""
    return torch.randint(3, TINY["vocab_size"], (rows, tokens), generator=torch.Generator().manual_seed(seed))


def head_inputs(auto_class: str, rows: int = 3, tokens: int = 12) -> dict[str, torch.Tensor]:
    """Return inputs with labels for one head: random tokens, the first row padded on the right."""
    generator = torch.Generator().manual_seed(1)
    shape = (rows, 2, tokens) if auto_class.endswith("MultipleChoice") else (rows, tokens)
    ids = torch.randint(3, TINY["vocab_size"], shape, generator=generator)
    ids[..., 4] = TINY["eos_token_id"]  # ends the question, where there is one
    mask = torch.ones_like(ids)
    mask[0, ..., -4:] = 0
    inputs = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    labels: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "AutoModel": dict,
        "AutoModelForCausalLM": lambda: {"labels": ids.masked_fill(mask == 0, -100)},
        "AutoModelForMaskedLM": lambda: {"labels": ids.masked_fill(mask == 0, -100)},
        "AutoModelForMultipleChoice": lambda: {"labels": torch.ones(rows, dtype=torch.long)},
        "AutoModelForQuestionAnswering": lambda: {
            "start_positions": torch.ones(rows, dtype=torch.long),
            "end_positions": torch.full((rows,), 3),
        },
        "AutoModelForSequenceClassification": lambda: {"labels": torch.ones(rows, dtype=torch.long)},
        "AutoModelForTokenClassification": lambda: {"labels": (ids % 2).masked_fill(mask == 0, -100)},
    }
    return {**inputs, **labels[auto_class]()}


def first_tensor(output: Any) -> torch.Tensor:
    """Return the main output of any head."""
    return next(output[name] for name in ("logits", "start_logits", "last_hidden_state") if name in output)


def scalar(output: Any) -> torch.Tensor:
    """Return what a gradient can be asked of: the loss, or the sum of what there is."""
    return output["loss"] if "loss" in output else first_tensor(output).sum()
