"""Processes that train routing heads move the centroids as one: by what the batches of all of them show."""

from pathlib import Path

import torch
from distributed import run_distributed
from models.routing_transformer.tiny_models import build
from processes.centroids_script import batches, train

SCRIPT = Path(__file__).parent / "centroids_script.py"


def test_centroids_are_the_same_on_every_rank_and_those_of_one_process(tmp_path: Path) -> None:
    run_distributed(SCRIPT, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = build().train()
    start = {name: each.clone() for name, each in alone.state_dict().items()}
    train(alone, batches())
    centroids = [name for name in first if "centroids" in name]
    assert len(centroids) == 6
    for name in centroids:
        assert torch.equal(first[name], second[name])
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(first[name], expected, atol=1e-5, rtol=1e-4)
        assert "positions" in name or not torch.equal(start[name], expected)
