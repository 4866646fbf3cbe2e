"""The public face: what `__all__` promises is there, sorted, documented, and nothing else is offered."""

import inspect
from types import ModuleType

import pytest

import hf_efficient_attn as hea
from hf_efficient_attn import errors
from hf_efficient_attn.models.register import FAMILIES

# functions that the package's modules share, reachable from the top but no part of its face
INTERNAL = {"fill_cards", "register_families", "write_stubs"}
PUBLIC_MODULES = {"hub", "patterns"}


FACES = [hea, *(getattr(hea, name) for name in sorted(PUBLIC_MODULES))]


@pytest.mark.parametrize("face", FACES)
def test_all_is_sorted_and_importable(face: ModuleType) -> None:
    assert face.__all__ == sorted(face.__all__)
    assert all(hasattr(face, name) for name in face.__all__)


def test_all_is_everything() -> None:
    public = {
        name
        for name, value in vars(hea).items()
        if not name.startswith("_") and (not inspect.ismodule(value) or name in PUBLIC_MODULES) and name not in INTERNAL
    }
    assert public == set(hea.__all__)


@pytest.mark.parametrize("face", FACES)
def test_every_public_name_has_a_docstring(face: ModuleType) -> None:
    missing = [name for name in face.__all__ if not inspect.getdoc(getattr(face, name))]
    assert missing == []


def test_every_class_of_every_family_is_public() -> None:
    for family in FAMILIES:
        names = {name for name in family.__all__ if "PreTrained" not in name}
        assert names <= set(hea.__all__)


def test_error_tree_in_the_docstring_is_the_real_one() -> None:
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass)]
    assert all(f"{cls.__name__} " in errors.__doc__ for cls in classes)
    assert all(issubclass(cls, ValueError) for cls in classes)
