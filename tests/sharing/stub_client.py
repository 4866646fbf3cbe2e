"""A user who has not imported the package loads models by name; a process of its own.

    python stub_client.py '{"tester/model": ["AutoModelForCausalLM", …], …}'

Each is loaded without trust, then with trust where the package is not installed, then where it is, by `transformers
serve`, and by the Auto classes that its sender says. Prints one line of JSON.
"""

import importlib.abc
import json
import sys
from typing import Any

import transformers
from sharing.compared import output_digest

PACKAGE = "hf_efficient_attn"


class NotInstalled(importlib.abc.MetaPathFinder):
    """Refuse the package as Python does where it is not installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == PACKAGE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def refusal(repo: str, head: str, **options: Any) -> str:
    """Return the error of loading a model."""
    try:
        getattr(transformers, head).from_pretrained(repo, **options)
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


def load(repo: str, heads: list[str]) -> dict[str, Any]:
    """Load a model by each head, the first the one it was saved with; return what was found."""
    classes, digest = {}, None
    for head in heads:
        model = getattr(transformers, head).from_pretrained(repo, trust_remote_code=True)
        classes[head] = type(model).__name__
        assert type(model).__module__.partition(".")[0] in (PACKAGE, "transformers")
        assert type(model)._auto_class is type(model.config)._auto_class is None, "no code of others is saved with it"
        digest = digest or output_digest(model)
    return {"classes": classes, "digest": digest}


def known_names(repo: str) -> list[str]:
    """Return the names of a saved config for which transformers has code, as serving engines look them up."""
    names = transformers.PreTrainedConfig.get_config_dict(repo)[0]["architectures"]
    return [name for name in names if hasattr(transformers, name)]


def served(repo: str) -> str:
    """Return the name of the class that `transformers serve --trust-remote-code` loads for a model, and runs."""
    # here, since it takes a second that other users of this file need not wait
    from transformers.cli.serving.model_manager import ModelManager

    manager = ModelManager(device="cpu", dtype="auto", trust_remote_code=True)
    model = manager._load_model(f"{repo}@main")
    return f"{type(model).__name__} {output_digest(model)}"


def registered() -> list[str]:
    """Return the classes outside this package that Auto classes of transformers load."""
    autos = (getattr(transformers, name) for name in dir(transformers) if name.startswith("AutoModel"))
    found = [model for auto in autos for model in getattr(auto._model_mapping, "_extra_content", {}).values()]
    return [str(model) for model in found if not model.__module__.startswith(f"{PACKAGE}.models")]


def main(wanted: dict[str, list[str]]) -> dict[str, Any]:
    untrusted = {repo: refusal(repo, heads[0]) for repo, heads in wanted.items()}
    sys.meta_path.insert(0, NotInstalled())
    not_installed = {repo: refusal(repo, heads[0], trust_remote_code=True) for repo, heads in wanted.items()}
    sys.meta_path.pop(0)
    names = {repo: known_names(repo) for repo in wanted}
    was_imported = PACKAGE in sys.modules
    by_server = {repo: served(repo) for repo in wanted}
    loaded = {repo: load(repo, heads) for repo, heads in wanted.items()}
    return {
        "untrusted": untrusted,
        "not_installed": not_installed,
        "known_names": names,
        "was_imported": was_imported,
        "served": by_server,
        "loaded": loaded,
        "registered": registered(),
    }


if __name__ == "__main__":
    # behind a question of transformers, which nobody has answered
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))))
