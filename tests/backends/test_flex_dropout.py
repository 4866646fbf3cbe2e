"""Which weights flex drops: as many as asked for, and none because of another."""

import torch

from hf_efficient_attn.backends.flex.dropout import Dropout

SIZES = (3, 4, 300, 500)


def kept(probability: float, seed: int) -> torch.Tensor:
    places = [torch.arange(size).reshape(-1, *[1] * (3 - dim)) for dim, size in enumerate(SIZES)]
    return Dropout(probability, torch.tensor(seed, dtype=torch.int32)).is_kept(*places)


def test_drops_as_many_weights_as_asked_for_in_rows_and_columns() -> None:
    for probability in (0.01, 0.3, 0.9):
        drawn, variance = kept(probability, 5).double(), probability * (1 - probability)
        assert drawn.shape == SIZES
        assert abs(drawn.mean() - (1 - probability)) < 4 * (variance / drawn.numel()) ** 0.5
        for dim in (2, 3):
            assert abs(drawn.mean(dim).std() / (variance / SIZES[dim]) ** 0.5 - 1) < 0.1


def test_neighbours_and_seeds_are_independent() -> None:
    first, other = (kept(0.5, seed).double() - 0.5 for seed in (5, 6))
    pairs = [(first, other)]
    pairs += [(first.narrow(dim, 1, size - 1), first.narrow(dim, 0, size - 1)) for dim, size in enumerate(SIZES)]
    for one, next_one in pairs:
        assert abs((one * next_one).mean()) * 4 < 5 / one.numel() ** 0.5


def test_the_seed_says_all() -> None:
    assert torch.equal(kept(0.1, -9), kept(0.1, -9))
