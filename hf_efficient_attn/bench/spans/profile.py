"""How far the heads of the models of `bench spans` read: as in a trained model of the paper, where few heads are long.

Source: Sukhbaatar et al., "Adaptive Attention Span in Transformers" (arXiv:1905.07799), figure 4: 12 layers, 8 heads,
span limit 4,096. The longest head of each layer is read off that picture, to about 10%; of the others it shows that few
are long. With a second long head of 0.3 of the first, and the rest at the ramp, heads read 312 tokens on average at a
limit of 8,192, where the paper prints 314.
"""

RAMP_TOKENS = 32
# the span limit of the model in the picture
SEEN_LIMIT = 4096
# tokens that the longest head of each layer reads there, ramp included
LONGEST = (32, 32, 32, 32, 32, 100, 220, 1100, 3200, 230, 3900, 1700)
SECOND_SHARE = 0.3


def profile(limit: int, num_layers: int, num_heads: int) -> list[list[int]]:
    """Return how many tokens each head of each layer reads, ramp included, in proportion to the span limit.

    Fewer layers than in the picture are picked from all of its depth.

    >>> profile(2048, 12, 4)[8:10]
    [[1600, 32, 480, 32], [32, 115, 32, 34]]
    >>> [max(layer) for layer in profile(4096, 4, 2)]
    [32, 32, 1100, 3900]
    """
    layers = []
    for index in range(num_layers):
        longest = LONGEST[(2 * index + 1) * len(LONGEST) // (2 * num_layers)] * limit / SEEN_LIMIT
        tokens = [0.0] * num_heads
        # long heads stand anywhere, as training leaves them
        tokens[(index + num_heads // 2) % num_heads] = SECOND_SHARE * longest
        tokens[index % num_heads] = longest
        layers.append([min(limit, max(RAMP_TOKENS, int(each))) for each in tokens])
    return layers


def average(layers: list[list[int]]) -> float:
    """Return how many tokens a head reads on average.

    >>> round(average(profile(8192, 12, 8)))
    312
    """
    return sum(map(sum, layers)) / sum(map(len, layers))
