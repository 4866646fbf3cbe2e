"""Run the contract of low precision for every case of every family, encoder-decoders and sparsified models included."""

import pytest
from families import CASES, SEQ2SEQ_CASES, SPARSIFIED
from models.precision_contract import PrecisionCacheContract, PrecisionContract
from models_cases import case_param, parametrize_cases

# by what of a layer stays in float32 under autocast: scores, the sizes of spans, sums over all keys. Traced for all
# lengths every family is, by its export, and at one length with masks and gradients.
COMPILED = ("sparse-longformer", "span-modern", "compressed-linear-causal")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    decoders = [case for case in CASES if case.is_causal]
    if "compiled_case" in metafunc.fixturenames:
        every = [case for case in (*CASES, *SEQ2SEQ_CASES) if case.shows_a_route]
        compiled = [case_param(case, is_thorough=case.name not in COMPILED) for case in every]
        metafunc.parametrize("compiled_case", compiled)
        return
    for name, others in (("own_case", ()), ("any_case", SPARSIFIED.cases)):
        if name in metafunc.fixturenames:
            every = [*CASES, *SEQ2SEQ_CASES, *others]
            # how a case is loaded and computes is the same along a route
            routed = [case_param(case, is_thorough=not getattr(case, "shows_a_route", True)) for case in every]
            metafunc.parametrize(name, routed)
            return
    cases = decoders if metafunc.cls is TestPrecisionCacheContract else [*CASES, *SEQ2SEQ_CASES]
    parametrize_cases(metafunc, cases, others_are_thorough=True)


class TestPrecisionContract(PrecisionContract): ...


class TestPrecisionCacheContract(PrecisionCacheContract): ...
