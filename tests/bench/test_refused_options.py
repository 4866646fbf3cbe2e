"""`hf-efficient-attn bench`: which options its commands refuse."""

import pytest

from hf_efficient_attn.cli import main


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("attention", ["--repeats", 0], "repeats=0 must be at least 1"),
        ("attention", ["--lengths", 0], "lengths=0 must be at least 1"),
        ("attention", ["--patterns", "bands"], "bands"),
        ("attention", ["--backends", "flash"], "invalid choice: 'flash'"),
        ("attention", ["--peers", "flash"], "invalid choice: 'flash'"),
        # what is given holds with --quick, too
        ("attention", ["--quick", "--lengths", 0], "lengths=0 must be at least 1"),
        ("attention", ["--profile", "--lengths", 64, "--no-memory"], "no use of --lengths, --no-memory"),
        ("blocks", ["--num-layers", 0, "--quick"], "num_layers=0 must be at least 1"),
        ("blocks", ["--counts", "--tokens", 5, "--compile"], "--counts makes no use of --tokens, --compile"),
        ("content", ["--hashes", 0], "hashes=0 must be at least 1"),
        ("content", ["--depths", 2, 0], "depths=0 must be at least 1"),
        ("content", ["--lengths", 100], "needs a multiple of hash_chunk_tokens=64 tokens, not 100"),
        ("content", ["--layers", "linear"], "invalid choice: 'linear'"),
        ("models", ["--repeats", 0], "repeats=0 must be at least 1"),
        ("models", ["--lengths", 0], "lengths=0 must be at least 1"),
        ("models", ["--threads", 0], "threads=0 must be at least 1"),
        ("models", ["--attention-dropout", 1], "attention_dropout=1.0 must be at least 0 and below 1"),
        ("models", ["--peers", "xlnet"], "invalid choice: 'xlnet'"),
        ("spans", ["--repeats", 0], "repeats=0 must be at least 1"),
        ("spans", ["--limits", 0], "limits=0 must be at least 1"),
        ("spans", ["--decode-batch-sizes", 1, 0], "decode_batch_sizes=0 must be at least 1"),
        ("spans", ["--threads", 0], "threads=0 must be at least 1"),
        ("spans", ["--attention-dropout", 1], "attention_dropout=1.0 must be at least 0 and below 1"),
        ("spans", ["--positions", "alibi"], "invalid choice: 'alibi'"),
        ("star", ["--repeats", 0], "repeats=0 must be at least 1"),
        ("star", ["--hidden-size", 24], "hidden_size=24 must be a multiple of 2 · heads=16"),
    ],
)
def test_refusals(command: str, options: list[object], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", command, *map(str, options)])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
