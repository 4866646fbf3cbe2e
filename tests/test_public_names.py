"""The public face: what `__all__` promises is there, sorted and documented, and so is what is found lazily."""

import inspect
from types import ModuleType

import pytest

import hf_efficient_attn as hea
from hf_efficient_attn import errors
from hf_efficient_attn.models.register import FAMILIES

# what the package calls when it is imported, reachable from the top but no part of its face
INTERNAL = {"Any", "FAMILIES", "fill_cards", "register_families", "write_stubs"}
PUBLIC_MODULES = {"hub", "models", "patterns", "training"}
FACES = [hea, hea.hub, hea.patterns, hea.training]


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
    names = {*face.__all__, *getattr(face, "_LAZY", ())}
    missing = [name for name in names if not inspect.getdoc(getattr(face, name))]
    assert missing == []


def test_every_class_of_every_family_is_found_at_the_top() -> None:
    for family in FAMILIES:
        assert set(family.__all__) <= set(dir(hea))
        assert all(getattr(hea, name) is getattr(family, name) for name in family.__all__)


def test_training_helpers_terms_and_selected_keys_are_found_at_the_top() -> None:
    assert {*hea.training.__all__, "ChosenBlocks", "Distance", "LightningIndexer"} <= set(dir(hea))
    assert hea.SpanCallback is hea.training.SpanCallback


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'hf_efficient_attn' has no attribute 'SparceTransformerModel'"):
        _ = hea.SparceTransformerModel


def test_error_tree_in_the_docstring_is_the_real_one() -> None:
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass)]
    assert all(f"{cls.__name__} " in errors.__doc__ for cls in classes)
    assert all(issubclass(cls, ValueError) for cls in classes)
