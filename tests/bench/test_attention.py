"""`hf-efficient-attn bench attention`: what it writes, computes and refuses. No timing is asserted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.exc import InductorError

from hf_efficient_attn.bench import attention as bench_attention
from hf_efficient_attn.bench.attention import attempt, waiting_threads
from hf_efficient_attn.bench.attention_report import add_ratios
from hf_efficient_attn.bench.cases import PRESETS, Shape, decode_pattern_of, own_call, pattern_of, steps
from hf_efficient_attn.bench.peers import PEERS, Problem, build_peer
from hf_efficient_attn.bench.report import crossover
from hf_efficient_attn.bench.timing import Case as TimingCase
from hf_efficient_attn.cli import main
from hf_efficient_attn.patterns import bigbird

PATTERNS = ["band(4, 4)", "bigbird(4, 1)"]
LENGTHS = [16, 32, 64]
TINY = ["--heads", "2", "--head-dim", "8", "--repeats", "2", "--max-seconds", "0", "--device", "cpu"]
SUMMARY = {"median", "first_quartile", "third_quartile"}
SHAPE = Shape(batch_size=2, num_heads=2, head_dim=8, dtype="float32", device="cpu")
# those of torch's compiler, and of the way transformers 5 compiles its masks
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def bench(*options: object) -> None:
    """Run the command at a tiny size; later options win."""
    main(["bench", "attention", *TINY, *map(str, options)])


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a run over two patterns, two backends and some peers wrote; dense is measured up to 32 tokens."""
    folder = tmp_path_factory.mktemp("bench") / "new"
    options = ["--patterns", *PATTERNS, "--lengths", *LENGTHS, "--backends", "auto", "blocked"]
    bench(*options, "--peers", "masked", "longformer_layer", "--dense-limit", 32, "--peer-limit", 32, "--no-memory",
          "--output", folder)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def results(output: Path) -> Any:
    return json.loads((output / "attention.json").read_text())


def test_a_row_per_pattern_length_and_contestant(results: Any) -> None:
    assert set(results) == {"machine", "settings", "overhead", "dense", "results"}
    rows = [(row["tokens"], row["pattern"], row["contestant"]) for row in results["results"]]
    contestants = ["auto", "blocked", "masked"]
    assert rows == [(tokens, name, by) for tokens in LENGTHS for name in PATTERNS for by in contestants]
    assert [row["tokens"] for row in results["dense"]] == LENGTHS
    assert results["settings"]["lengths"] == LENGTHS
    assert results["machine"]["device"] == "cpu"


def test_the_overhead_of_a_call_is_a_row_per_pattern_and_length(output: Path, results: Any) -> None:
    figures = {(row["pattern"], row["tokens"]): row["microseconds"] for row in results["overhead"]}
    rows = ("causal", "wide band", "step, PatternCache", "step, SpanCache")
    assert list(figures) == [(name, tokens) for name in rows for tokens in (128, 256, 512)]
    assert all(set(figure) == SUMMARY for figure in figures.values())
    line = next(line for line in (output / "attention.md").read_text().splitlines() if line.startswith("| wide band"))
    assert line.split("|")[2].strip() == f"{figures['wide band', 128]['median']:.0f}"


@torch.no_grad()
@pytest.mark.parametrize("num_first", [0, 4])
def test_a_step_of_decoding_reads_what_its_layer_holds(num_first: int) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    ours, plain = steps(num_first, [q, k, v])
    torch.testing.assert_close(ours.run(None), plain.run(None))
    # every further step adds the same token, and drops another
    ours.run(None)
    kept = torch.cat([k[:, :, :num_first], k[:, :, num_first + 2 :], k[:, :, [-1] * 3]], 2)
    values = torch.cat([v[:, :, :num_first], v[:, :, num_first + 2 :], v[:, :, [-1] * 3]], 2)
    expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], kept, values)
    torch.testing.assert_close(ours.run(None), expected)


def test_figures_belong_together(results: Any) -> None:
    for row in results["results"]:
        if row["contestant"] == "masked":
            assert ("reason" in row["forward"]) == (row["tokens"] > 32)
            continue
        total = 2 * row["tokens"] ** 2
        assert 0 < row["allowed_pairs"] <= min(row["computed_pairs"], total)
        assert row["backend"] in ("blocked", "sdpa")
        assert row["layout_milliseconds"] > 0
        for measure in ("forward", "forward_backward"):
            figures = row[measure]
            for name in ("milliseconds", "speed_against_dense", "efficiency"):
                assert set(figures[name]) == SUMMARY
                assert 0 < figures[name]["first_quartile"] <= figures[name]["median"]
            share = row["allowed_pairs"] / total
            assert figures["efficiency"]["median"] == pytest.approx(figures["speed_against_dense"]["median"] * share)
        # a causal BigBird of other sizes must be written out
        assert ("reason" in row["decode"]) == row["pattern"].startswith("bigbird")
        assert row["first_call_milliseconds"] > 0


def test_dense_is_extrapolated_and_marked(results: Any, output: Path) -> None:
    measured, extrapolated = results["dense"][1]["forward"], results["dense"][2]["forward"]
    assert "is_extrapolated" not in measured
    assert extrapolated["is_extrapolated"]
    assert extrapolated["milliseconds"]["median"] == pytest.approx(4 * measured["milliseconds"]["median"])
    assert "*" in (output / "attention.md").read_text()


def test_tables_and_picture(output: Path) -> None:
    markdown = (output / "attention.md").read_text()
    for title in ("Useful-pair efficiency, forward", "Growth, crossover, layout", "Milliseconds per decoding step"):
        assert f"## {title}" in markdown
    assert "| band(4, 4), auto " in markdown
    assert "- masked, forward and forward + backward: measured only from 1 to 32 tokens." in markdown
    assert "Peak MiB" not in markdown
    assert (output / "attention.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_memory_and_absent_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # in a process of its own, which takes seconds to start: test_contest.py
    monkeypatch.setattr(bench_attention, "peak_memory", lambda build, arguments, device: build(**arguments)() and 1)
    options = ["--patterns", "band", "--lengths", 32, 64, "--backends", "auto", "--peers", "natten"]
    bench(*options, "--memory-from", 64, "--dense-limit", 32, "--output", tmp_path)
    printed = capsys.readouterr().out
    assert "natten, forward and forward + backward: natten needs a CUDA device." in printed
    rows = json.loads((tmp_path / "attention.json").read_text())["results"]
    peaks = {row["tokens"]: row["peak_memory_bytes"] for row in rows if row["contestant"] == "auto"}
    assert {tokens: peak is None for tokens, peak in peaks.items()} == {32: True, 64: False}


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_a_backend_that_has_no_backward_pass_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--patterns", "band(4, 4)", "--lengths", 32, "--backends", "flex", "--peers", "--no-memory"]
    with torch.compiler.set_stance("force_eager"):
        bench(*options, "--output", tmp_path)
    (row,) = json.loads((tmp_path / "attention.json").read_text())["results"]
    assert "milliseconds" in row["forward"]
    assert row["backend"] == "flex"
    assert "flex" in row["forward_backward"]["reason"]
    assert "Not measured:" in capsys.readouterr().out


def test_an_error_of_the_compiler_is_a_result() -> None:
    def fail(_: object) -> None:
        raise InductorError(RuntimeError("no such layout"), None)

    row: dict[str, Any] = {}
    assert not attempt(row, "forward", TimingCase(fail), torch.device("cpu"))
    assert row["forward"]["reason"] == "InductorError: RuntimeError: no such layout"


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
@pytest.mark.parametrize(
    ("peer", "name"),
    [*(("masked", name) for name in PRESETS), ("longformer_layer", "longformer"), ("transformers_flex", "longformer")],
)
def test_peers_compute_what_we_compute(peer: str, name: str) -> None:
    tokens = 512
    inputs = SHAPE.tensors(tokens)
    call = build_peer(peer, Problem(name, inputs))
    assert not isinstance(call, str)
    with torch.compiler.set_stance("force_eager"):
        out = call.run_forward()
    expected = own_call(pattern_of(name, tokens), inputs, "reference").run_forward()
    if out.shape != expected.shape:
        out = out.reshape(2, tokens, 2, 8).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    if call.no_backward is None:
        call.forward_backward_case(torch.ones_like(call.run_forward())).run(None)


def test_the_in_tree_bigbird_layer_computes_its_published_plan() -> None:
    # at 1,024 tokens it reads some blocks twice
    tokens = 2048
    inputs = SHAPE.tensors(tokens)
    call = build_peer("bigbird_layer", Problem("bigbird", inputs))
    assert not isinstance(call, str)
    expected = own_call(bigbird(64, 3, plan="transformers"), inputs, "reference").run_forward()
    torch.testing.assert_close(call.run_forward().reshape(2, tokens, 2, 8).transpose(1, 2), expected)


@pytest.mark.parametrize("peer", PEERS)
def test_every_peer_is_built_or_says_why_not(peer: str) -> None:
    for name in PEERS[peer].patterns or ("band",):
        # transformers compiles how it makes a mask, for seconds
        with torch.compiler.set_stance("force_eager"):
            call = build_peer(peer, Problem(name, SHAPE.tensors(100)))
        assert not isinstance(call, str) or call.endswith(".")


@pytest.mark.parametrize("name", [*PRESETS, "band(4, 4) | global(0)"])
def test_decoding_is_causal(name: str) -> None:
    pattern = decode_pattern_of(name, 1024).resolve(1024)
    assert pattern.num_keys_of(500, 1024) > 0
    assert all(stop <= 501 for _, stop in pattern.key_intervals(500, 500, 1024)) or pattern.is_causal


@pytest.mark.parametrize(
    ("load", "threads", "policy"), [(2.0, 2, None), (2.0, 2, "PASSIVE"), (0.0, 2, None), (2.0, 1, None)]
)
def test_a_busy_machine_is_said(load: float, threads: int, policy: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    text = waiting_threads()
    assert text.startswith(f"OMP_WAIT_POLICY {'is not set' if policy is None else 'is PASSIVE'}, GOMP_SPINCOUNT is not")
    assert ("Other programs are running" in text) == (load > 0 and threads > 1 and policy is None)


def test_crossover() -> None:
    dense = [(100, 1.0), (200, 4.0), (400, 16.0)]
    assert crossover(dense, [(100, 2.0), (200, 8.0), (400, 32.0)]) is None
    assert crossover(dense, [(100, 0.5), (200, 0.5), (400, 0.5)]) == (100.0, 0.5)
    # faster, slower, faster: what counts is from where on it stays so
    place = crossover(dense, [(100, 0.5), (200, 8.0), (400, 8.0)])
    assert place is not None
    assert 200 < place[0] < 400


def test_rounds_are_compared_one_by_one() -> None:
    def row(samples: list[float], **more: Any) -> dict[str, Any]:
        timed = {"milliseconds": {"median": samples[0]}, "samples": samples}
        missing = {"reason": "."}
        return {"tokens": 4, "forward": timed, "forward_backward": missing, "decode": missing, **more}

    ours = row([1.0, 2.0], num_heads=2, allowed_pairs=8)
    add_ratios([row([2.0, 8.0])], [ours])
    assert ours["forward"]["speed_against_dense"]["median"] == 3.0
    assert ours["forward"]["efficiency"]["median"] == 0.75
