"""TRL's command lines load a sparsified model as this does; a process of its own, which does not import the package.

    python trl_client.py FOLDER

Without trust, then with it. Prints one line of JSON.
"""

import json
import sys
from typing import Any

from sharing.hub_client import output_digest
from trl.trainer.utils import create_model_from_path

PACKAGE = "hf_efficient_attn"


def load(folder: str, trusts: bool) -> dict[str, Any]:
    """Load a model with what `trl sft` passes on where its user has given nothing."""
    options = {"revision": "main", "attn_implementation": None, "dtype": "float32"}
    model = create_model_from_path(folder, trust_remote_code=trusts, **options).eval()
    return {"attention": model.config._attn_implementation, "digest": output_digest(model)}


def main(folder: str) -> dict[str, Any]:
    try:
        untrusted = str(load(folder, trusts=False))
    except ValueError as error:
        untrusted = str(error)
    was_imported = PACKAGE in sys.modules
    return {"untrusted": untrusted, "was_imported": was_imported, "trusted": load(folder, trusts=True)}


if __name__ == "__main__":
    # behind a question of transformers, which nobody has answered
    print("\n" + json.dumps(main(sys.argv[1])))
