"""The command line: every command explains itself, and wrong ones say what exists."""

import pytest

from hf_efficient_attn.cli import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert f"hf-efficient-attn {' '.join(command)} [-h]" in capsys.readouterr().out


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["benchmark"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert all(command in message for command, *_ in COMMANDS)


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["analyze", "signal", "--model", "sas", "--tokens", "1"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("hf-efficient-attn: error: ")
