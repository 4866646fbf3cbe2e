"""examples/tour.ipynb runs from the first cell to the last, and is committed as it ran.

After a change `jupyter execute --inplace examples/tour.ipynb` renews what it shows.
"""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

TOUR = Path(__file__).parents[1] / "examples" / "tour.ipynb"
PICTURE = "image/png"


def outputs_of(notebook: NotebookNode) -> list[list[NotebookNode]]:
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def num_pictures(notebook: NotebookNode) -> int:
    return sum(PICTURE in output.get("data", {}) for outputs in outputs_of(notebook) for output in outputs)


# of jupyter's own code
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_every_cell_runs_in_a_fresh_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(TOUR, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output for outputs in outputs_of(notebook) for output in outputs if output.output_type == "stream"]
    assert [output.text for output in printed if output.name == "stderr"] == []
    assert num_pictures(notebook) == num_pictures(nbformat.read(TOUR, as_version=4)) >= 3
    text = "".join(output.text for output in printed)
    assert "the same logits: True" in text
    assert "positions: 512 -> 4,096" in text
    assert "keys in the cache of a layer: 64," in text


def test_it_is_committed_as_it_ran_and_tells_nothing_of_the_machine() -> None:
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for outputs in outputs_of(notebook) for output in outputs)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    text = TOUR.read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert not [folder for folder in ("/home/", "/root/", "/tmp/", "/Users/", "site-packages") if folder in text]
