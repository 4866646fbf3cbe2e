"""`hf-efficient-attn bench`: which options its commands refuse."""

import pytest

from hf_efficient_attn.cli import main


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("attention", ["--repeats", 0], "repeats=0 must be at least 1"),
        ("attention", ["--lengths", 0], "lengths=0 must be at least 1"),
        ("attention", ["--patterns", "bands"], "bands"),
        ("attention", ["--backends", "triton"], "invalid choice: 'triton'"),
        ("attention", ["--peers", "flash"], "invalid choice: 'flash'"),
        # what is given holds with --quick, too
        ("attention", ["--quick", "--lengths", 0], "lengths=0 must be at least 1"),
        ("models", ["--repeats", 0], "repeats=0 must be at least 1"),
        ("models", ["--lengths", 0], "lengths=0 must be at least 1"),
        ("models", ["--threads", 0], "threads=0 must be at least 1"),
        ("models", ["--attention-dropout", 1], "attention_dropout=1.0 must be at least 0 and below 1"),
        ("models", ["--peers", "xlnet"], "invalid choice: 'xlnet'"),
    ],
)
def test_refusals(command: str, options: list[object], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", command, *map(str, options)])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
