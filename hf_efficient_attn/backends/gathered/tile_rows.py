"""Which rows of a call's tensors the queries and keys of tiles are."""

from torch import Tensor

from hf_efficient_attn.backends.gathered.rows import Rows
from hf_efficient_attn.layout.chosen.tiles import Tiles

Steps = tuple[int, int, int]


class TileRows:
    """The queries and keys of tiles as numbers of rows, which are found once for all tensors whose rows lie alike."""

    def __init__(self, tiles: Tiles, num_keys: int) -> None:
        self.tiles, self.num_keys = tiles, num_keys
        self.numbers_of_queries: dict[Steps, Tensor] = {}
        self.numbers_of_keys: dict[Steps, Tensor] = {}

    def query_numbers(self, rows: Rows) -> Tensor:
        """Return the numbers of the rows of queries, [sets, tiles, queries]."""
        tiles, found = self.tiles, self.numbers_of_queries
        if rows.steps not in found:
            found[rows.steps] = rows.numbers(tiles.examples[:, None, None], tiles.heads, tiles.queries)
        return found[rows.steps]

    def key_numbers(self, rows: Rows) -> Tensor:
        """Return the numbers of the rows of keys, [sets, places]."""
        tiles, found = self.tiles, self.numbers_of_keys
        if rows.steps not in found:
            keys = tiles.keys.masked_fill(tiles.keys >= self.num_keys, -1)
            found[rows.steps] = rows.numbers(tiles.examples[:, None], tiles.key_heads[:, None], keys)
        return found[rows.steps]

    def of_queries(self, rows: Rows) -> Tensor:
        """Return the rows of queries, [sets, tiles, queries, ...]."""
        return rows.take(self.query_numbers(rows))

    def keys(self, rows: Rows) -> Tensor:
        """Return the rows of the keys of sets, [sets, places, width]."""
        return rows.take(self.key_numbers(rows))

    def of_keys(self, rows: Rows) -> Tensor:
        """Return the rows of the keys of each tile, overlapping views [sets, tiles, keys, width]."""
        return self.tiles.of_keys(self.keys(rows))
