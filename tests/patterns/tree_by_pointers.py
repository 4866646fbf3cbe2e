"""The edges of a span tree, one by one, with the moving pointers of the authors' builder."""

from collections.abc import Iterator

Labels = dict[tuple[int, int], int]


def build(num_tokens: int, k: int, is_causal: bool, builder: str) -> Labels:
    """Return the label of every edge (query, key), built edge by edge with moving pointers."""
    sizes = [num_tokens]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] + 1) // 2)
    offsets = [sum(sizes[:level]) for level in range(len(sizes))]
    labels: Labels = {}
    for level, size in enumerate(sizes):
        for node in range(size):
            for token in range(node << level, min(num_tokens, (node + 1) << level)):
                labels[offsets[level] + node, token] = (2 * k + 1) * level
    for query in range(num_tokens):
        for side in (-1,) if is_causal else (-1, 1):
            for level, node_level, node, label in contexts(query, side, sizes, k):
                # the released builder does not see that a stand-in lies beyond its level
                if node < sizes[node_level] or builder == "release":
                    labels.setdefault((query, offsets[node_level] + node), (2 * k + 1) * level + label)
    return labels


def contexts(query: int, side: int, sizes: list[int], k: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (level, level of the node, node, label) for what a token reads on one side."""
    pointer, stand_in = query + side, None
    for level, size in enumerate(sizes):
        reachable = pointer + 1 if side < 0 else size - pointer
        for place in range(max(0, min(k, reachable))):
            label = 2 * place + (1 if side < 0 else 2)
            if place == 0 and stand_in is not None:
                yield level, level - 1, stand_in, label
            else:
                yield level, level, pointer + side * place, label
        beyond = pointer + side * k
        stand_in = beyond if beyond % 2 == (0 if side < 0 else 1) else None
        pointer = beyond >> 1
