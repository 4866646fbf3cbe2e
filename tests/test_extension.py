"""In a copy of the package, CONTRIBUTING's steps add a pattern, a backend and a family, and the contracts pass."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from forked import server

ROOT = Path(__file__).parents[1]
NEW_FILES = Path(__file__).with_name("extension")
PREFIX = '"prefix": Pattern.kinds["prefix"](70) | Causal(),'
FAMILY = (
    "LocalEncoderConfig",
    "LocalEncoderForMaskedLM",
    "LocalEncoderForTokenClassification",
    "LocalEncoderModel",
)
# section of CONTRIBUTING.md -> what is added: (file, the text behind which it stands, what is added)
ADDITIONS: dict[str, list[tuple[str, str, str]]] = {
    "Add a pattern": [
        (
            "hf_efficient_attn/patterns/__init__.py",
            "patterns.per_head import PerHead\n",
            "from hf_efficient_attn.patterns.prefix import Prefix\n",
        ),
        ("hf_efficient_attn/patterns/__init__.py", '    "PerHead",\n', '    "Prefix",\n'),
        ("tests/patterns/strategies.py", "    PerHead,\n", "    Prefix,\n"),
        ("tests/patterns/strategies.py", "    st.just(Causal()),\n", "    st.builds(Prefix, small),\n"),
        ("tests/layout/test_compile.py", "\nPATTERNS = {\n", f"    {PREFIX}\n"),
        ("tests/backends_cases.py", "\nPATTERNS: dict[str, Pattern] = {\n", f"    {PREFIX}\n"),
        ("tests/fuzz_formula.py", "    **dict.fromkeys", '(("prefix",), read_prefix),\n    **dict.fromkeys'),
        (
            "tests/fuzz_formula.py",
            "    return reads\n",
            "\n\ndef read_prefix(pattern, num_tokens, head):\n"
            "    query, key = grid(num_tokens)\n"
            "    return (key < pattern.num_tokens) & (query >= 0)\n",
        ),
        ("tests/fuzz_drawn.py", "    PerHead,\n", "    Prefix,\n"),
        (
            "tests/fuzz_drawn.py",
            "lambda rng, num_keys: Full(),\n",
            "    lambda rng, num_keys: Prefix(num_keys // 2 + 1),\n",
        ),
    ],
    "Add a backend": [
        ("hf_efficient_attn/attention/select.py", "from hf_efficient_attn.backends import ", "einsum, "),
        ("hf_efficient_attn/attention/select.py", "for module in (", "einsum, "),
        ("tests/backends/test_contract.py", "from hf_efficient_attn.backends import ", "einsum, "),
        ("tests/backends/test_contract.py", '= {"sdpa": sdpa, ', '"einsum": einsum, '),
    ],
    "Add a family": [
        (
            "hf_efficient_attn/models/register.py",
            "import modeling_adaptive_span\n",
            "from hf_efficient_attn.models.local_encoder import modeling_local_encoder\n",
        ),
        ("hf_efficient_attn/models/register.py", "    modeling_adaptive_span,\n", "    modeling_local_encoder,\n"),
        (
            "hf_efficient_attn/__init__.py",
            "Slope, SoftSpan, SpanRelation, Term\n",
            f"from hf_efficient_attn.models.local_encoder import {', '.join(FAMILY)}\n",
        ),
        ("hf_efficient_attn/__init__.py", '    "InputError",\n', "".join(f'    "{name}",\n' for name in FAMILY)),
        (
            "tests/families.py",
            "from typing import Any\n",
            "from family import Family\nfrom models_cases import Case\nimport hf_efficient_attn as hea\n",
        ),
        (
            "tests/families.py",
            "\nOURS = (",
            'Family("local_encoder", (Case("local", hea.LocalEncoderConfig, (("reach_tokens", 3),)),)), ',
        ),
    ],
}
# what proves them: files and names of tests
PROOFS: dict[str, tuple[list[str], str]] = {
    "Add a pattern": (
        [
            "tests/patterns/test_pattern.py",
            "tests/layout/test_compile.py",
            "tests/backends/test_contract.py",
            "tests/test_fuzz_engine.py",
        ],
        "(prefix or test_pattern or formula or random_calls) and not 10",
    ),
    "Add a backend": (
        ["tests/backends/test_contract.py"],
        "backends and (prefix or globals or numbers or first_position) and not 10",
    ),
    "Add a family": (
        [
            "tests/models/test_contract.py",
            "tests/models/test_shared_contract.py",
            "tests/processes/test_pipeline.py",
            "tests/training/test_sequence_parallel.py",
        ],
        "[local and not compile and not export",
    ),
}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the root of a copy in which every step is done."""
    root = tmp_path_factory.mktemp("extended")
    skipped = shutil.ignore_patterns("__pycache__", "extension")
    for name in ("hf_efficient_attn", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copytree(NEW_FILES, root / "hf_efficient_attn", dirs_exist_ok=True, ignore=skipped)
    for additions in ADDITIONS.values():
        for name, before, added in additions:
            text = (root / name).read_text()
            assert before in text, (name, before)
            (root / name).write_text(text.replace(before, before + added, 1))
    return root


@pytest.mark.parametrize("section", ADDITIONS)
def test_the_section_names_every_file_that_is_changed(section: str) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    changed = {name.removeprefix("hf_efficient_attn/") for name, _, _ in ADDITIONS[section]}
    assert changed <= named


# of each section a few that would fail if what the additions call had changed
FEW = "(local and batch_mates) or (prefix and einsum and numbers)"


@pytest.mark.parametrize("chosen", [FEW, pytest.param("", marks=pytest.mark.thorough)], ids=["few", "all"])
def test_contracts_pass_with_the_additions(extended: Path, chosen: str) -> None:
    """One process for all: each takes seconds to import torch."""
    files = sorted({name for names, _ in PROOFS.values() for name in names})
    names = " or ".join(f"({words})" for _, words in PROOFS.values())
    if chosen:
        files, names = ["tests/backends/test_contract.py", "tests/models/test_contract.py"], f"({names}) and ({chosen})"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", names]
    environment = {**os.environ, "PYTHONPATH": str(extended)}
    done = server("forked_torch_imports").run(command, extended, environment)
    assert done.returncode == 0, done.stdout[-3000:]
