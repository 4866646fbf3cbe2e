"""Every example says what its options are."""

import runpy
import sys

import pytest
from run_example import EXAMPLES

# the scripts that users start; the others are their parts, some of which they start
SCRIPTS = (
    "answer_questions",
    "classify_documents",
    "continue_mlm",
    "convert_checkpoint",
    "run_qa",
    "sparsify_llama",
    "summarize_man_pages",
    "train_char_lm",
    "train_clm",
    "translate_help",
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / f"{script}.py"
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    assert stop.value.code in (0, None)
    printed = capsys.readouterr().out
    assert "usage:" in printed
    assert "--output_dir" in printed
