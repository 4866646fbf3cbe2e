"""Transformers' own tests of models (`ModelTesterMixin`, `ConfigTester`) on the families of hf_suite.json.

    python tests/transformers_suite.py --family sparse_causal sparse_longformer
    python tests/transformers_suite.py --folder FOLDER -- -n 2 -k training

The tests are those of the installed version: pip downloads its source distribution into the folder, unless it is there.
What stands behind `--` goes to pytest. The distribution lacks a few modules that the tests import, among them the tests
of generation and of export; tests/models/generation_contract.py and contract.py have those of ours.

A family of hf_suite.json has a config with its fields, its models by kind of head, attributes for the tester, and tests
that are skipped (`skip`, patterns of names), with the reason.
"""

import argparse
import fnmatch
import importlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import unittest
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    # nothing is looked for on the Hub
    os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
import transformers  # noqa: E402

PACKAGE = "transformers_tests"
# modules that the distribution lacks, with what is imported from them
MISSING = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}
# by kind of head, the tables of transformers by which the tests know a model's head
TABLES = {
    "base": "MODEL_MAPPING_NAMES",
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq_lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token_classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question_answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "multiple_choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
}
FAMILIES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("hf_suite.json").read_text())["families"]


def download(folder: Path) -> None:
    """Put the tests of the installed transformers into `folder`, as a package."""
    if (folder / PACKAGE).exists():
        return
    name = f"transformers=={transformers.__version__}"
    options = ["--quiet", "--no-binary", ":all:", "--no-deps", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, name], check=True, stdout=sys.stderr)
    (file,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(file) as archive:
        tests = [each for each in archive.getmembers() if each.name.split("/")[1:2] == ["tests"]]
        archive.extractall(folder, tests, filter="data")
    tests_folder = folder / file.name.removesuffix(".tar.gz") / "tests"
    for module, text in MISSING.items():
        if not (tests_folder / module).exists():
            (tests_folder / module).parent.mkdir(exist_ok=True)
            (tests_folder / module).write_text(text)
    for each in (tests_folder, *(path for path in tests_folder.iterdir() if path.is_dir())):
        (each / "__init__.py").touch()
    tests_folder.rename(folder / PACKAGE)


def by_path(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class Tester:
    """What the tests ask for a config and inputs: a few rows of a few tokens, some of them padded."""

    batch_size, seq_length, num_choices, is_training, pad_token_id = 13, 7, 4, True, 0

    def __init__(self, common: Any, family: dict[str, Any]) -> None:
        self.common, self.family, self.fields = common, family, family["config_kwargs"]
        config = self.get_config()
        self.encoder_seq_length = self.decoder_seq_length = self.seq_length
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            setattr(self, name, getattr(config, name))
        for name, value in family.get("tester", {}).items():
            setattr(self, name, value)

    def get_config(self) -> Any:
        return by_path(self.family["config"])(**self.fields)

    def ids(self) -> torch.Tensor:
        return self.common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size - 3) + 3

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids = self.ids()
        if self.family["kind"] == "decoder":
            mask = torch.ones_like(ids).tril()
        else:
            mask = self.common.random_attention_mask(ids.shape)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.family["kind"] == "encoder-decoder":
            inputs["attention_mask"] = torch.ones_like(ids)
            inputs |= {"decoder_input_ids": self.ids(), "decoder_attention_mask": torch.ones_like(ids)}
        if self.family.get("append_eos"):
            for name in ("input_ids", "decoder_input_ids"):
                inputs[name][:, -1] = self.fields["eos_token_id"]
        return self.get_config(), inputs

    def prepare_config_and_inputs_for_model_class(self, _: type) -> tuple[Any, dict[str, torch.Tensor]]:
        return self.prepare_config_and_inputs_for_common()


def classes(names: Iterable[str]) -> dict[str, type]:
    """Return a test class for each family."""
    common = importlib.import_module(f"{PACKAGE}.test_modeling_common")
    config_tester = importlib.import_module(f"{PACKAGE}.test_configuration_common").ConfigTester
    found: dict[str, type] = {}
    for family in FAMILIES:
        _know_heads(common, family)
        if family["name"] in names:
            found[family["name"]] = _class_of(family, common, config_tester)
    return found


def _know_heads(common: Any, family: dict[str, Any]) -> None:
    """Enter the models of a family into the copies that the tests have of transformers' tables."""
    model_type = by_path(family["config"]).model_type
    for kind, path in family["models"].items():
        known = getattr(common, TABLES[kind])
        setattr(common, TABLES[kind], {**known, model_type: path.rpartition(".")[2]})


def _class_of(family: dict[str, Any], common: Any, config_tester: type) -> type:
    def set_up(self: Any) -> None:
        self.model_tester = Tester(common, family)

    def test_config(self: Any) -> None:
        fields = {**family["config_kwargs"], "has_text_modality": True}
        config_tester(self, config_class=by_path(family["config"]), **fields).run_common_tests()

    attributes: dict[str, Any] = {
        "all_model_classes": tuple(map(by_path, family["models"].values())),
        "is_encoder_decoder": family["kind"] == "encoder-decoder",
        # else it asks for the year in the config's source
        "test_can_init_all_missing_weights_before_2023": True,
        "setUp": set_up,
        "test_config": test_config,
    }
    # the tests ask whether those who write texts have it
    writes = any(each.can_generate() for each in attributes["all_model_classes"])
    generation = (common.GenerationTesterMixin,) if writes else ()
    made = type(f"Test_{family['name']}", (common.ModelTesterMixin, *generation, unittest.TestCase), attributes)
    for pattern, reason in family.get("skip", {}).items():
        for name in fnmatch.filter(dir(made), pattern):
            setattr(made, name, unittest.skip(reason)(getattr(made, name)))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [family["name"] for family in FAMILIES]
    parser.add_argument("--family", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--folder", type=Path, help="of the distribution, default: one that is deleted at the end")
    parser.add_argument("pytest", nargs="*", help="options of pytest, behind --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        download(folder)
        sys.path.insert(0, str(folder))
        file = Path(temporary) / "test_families.py"
        file.write_text(f"import transformers_suite\nglobals().update(transformers_suite.classes({options.family}))\n")
        own = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", temporary, "--import-mode", "importlib"]
        own += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
        return int(pytest.main([str(file), *own, *options.pytest]))


if __name__ == "__main__":
    sys.exit(main())
