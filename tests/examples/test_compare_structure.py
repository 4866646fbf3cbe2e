"""examples/experiments/compare_structure.py, run as its users run it, on a few manual pages; and the pages under it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from run_example import finish_example, refusal, start_forked
from tiny_packages import gzipped, write_deb
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea

SCRIPT = "experiments/compare_structure.py"
TINY = ["--hidden_size", "16", "--num_hidden_layers", "1", "--num_attention_heads", "2", "--vocab_size", "270"]
TINY += ["--pretraining_steps", "2", "--max_steps", "2", "--batch_size", "2", "--kinds", "longformer", "etc_cpc"]
PAGE = r"""'\" t
.\" a comment
.TH tiny{0} 3
.SH NAME
tiny{0} \- counts \fIwords\fP \(aqhere\(aq
.SH SYNOPSIS
.BI "int tiny{0}(int " key );
.SH DESCRIPTION
The
.BR tiny{0} ()
function counts {1}.
.EX
code that is left out
.EE
.PP
It never fails, and \
never ends.
.SH "RETURN VALUE"
On success, zero is returned
.SH "A RARE TITLE"
too short
"""
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="reads a package of Debian")
def test_models_with_and_without_structure_are_compared(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    pages = {f"usr/share/man/man3/{word}.3.gz": gzipped(PAGE.format(word, f"{word} words")) for word in NUMBERS}
    write_deb(tmp_path / "cache" / "manpages-dev_1_all.deb", pages)
    assert refusal(start_forked(tmp_path, SCRIPT, "--kinds", "bert")).startswith("--kinds bert is unknown.")
    output = finish_example(start_forked(tmp_path, SCRIPT, *TINY))
    assert "words of a section alone (TF-IDF)" in output
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    assert found["data"]["titles"] == ["DESCRIPTION", "NAME", "RETURN VALUE", "SYNOPSIS"]
    assert found["data"]["held_out_sections"] == found["data"]["asked_sections"] == 2 * 4
    assert list(found["kinds"]) == ["longformer", "etc_cpc"]
    for kind, result in found["kinds"].items():
        assert [step for step, _ in result["losses"]] == [1, 2]
        assert 0 <= result["named"] <= 1
        saved = json.loads((tmp_path / "run" / kind / "result.json").read_text())
        assert saved["named"] == result["named"]
    model = hea.EtcTransformerForTokenClassification.from_pretrained(tmp_path / "run" / "etc_cpc")
    assert model.config.id2label[2] == "RETURN VALUE"
    assert (tmp_path / "run" / "named.png").stat().st_size > 10_000
    # what is there is not trained again
    again = finish_example(start_forked(tmp_path, SCRIPT, *TINY, "--resume"))
    assert "train_runtime" not in again
    assert "already holds a run" in refusal(start_forked(tmp_path, SCRIPT, *TINY))


def test_pages_lose_their_macros_and_rare_titles() -> None:
    from example_data.man_pages import _sections

    sections = dict(_sections(PAGE.format("one", "one word")))
    assert sections["NAME"] == "tinyone - counts words 'here'"
    assert sections["SYNOPSIS"] == "int tinyone(int key);"
    assert sections["DESCRIPTION"] == "The tinyone() function counts one word. It never fails, and never ends."


def test_the_first_token_of_every_section_is_asked_for_its_title() -> None:
    from comparison.page_sections import NOT_ASKED, SectionCollator

    items = [
        {"text": "w1 w2\n\nw3", "parts": [(0, 5), (7, 9)], "labels": [3, 1]},
        {"text": "w4\n\nw5 w6 w7\n\nw8", "parts": [(0, 2), (4, 12), (14, 16)], "labels": [0, 2, 5]},
    ]
    batch = SectionCollator(word_tokenizer(61), 4)(items)
    assert batch["labels"].tolist() == [[3, NOT_ASKED, 1, NOT_ASKED], [0, 2, NOT_ASKED, NOT_ASKED]]
    assert torch.equal(batch["global_mask"], torch.tensor([[1, 1], [1, 1]]))
