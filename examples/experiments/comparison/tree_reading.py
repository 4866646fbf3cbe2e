"""What tokens of a trained BP-Transformer read, by the size of the nodes, and the picture of compared trees."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.weight_rows import weights_of_rows
from hf_efficient_attn.pictures import new_figure

ITSELF = "itself"
COLORS = {"tree": "C2", "band": "C0", "dense": "C1"}


@torch.no_grad()
def share_by_size(model: Any, input_ids: Tensor, num_asked: int = 64) -> list[dict[str, float]]:
    """Return for each layer how much of their attention tokens give to themselves and to nodes of each size.

    Sizes are in tokens, as text; a mean over heads, documents, and tokens.

    Args:
        input_ids: [documents, tokens], without padding.
        num_asked: how many tokens of a document, at equal distances, are asked.
    """
    num_tokens = input_ids.shape[1]
    asked = torch.arange(0, num_tokens, max(1, num_tokens // num_asked))
    sizes, of_spans = sizes_of(num_tokens), span_sizes(num_tokens)
    found = []
    with weights_of_rows(asked.tolist()):
        attentions = model.eval().model(input_ids.to(model.device), output_attentions=True).attentions
    for weights in attentions:
        # [rows, 2K]: of each token that is asked, the tokens and the span behind each
        mean = weights.float().mean((0, 1)).cpu()
        tokens, spans = mean[:, ::2], mean[:, 1::2].mean(0)
        own = tokens.gather(1, asked[:, None]).mean().item()
        near = {ITSELF: own, "1": tokens.sum(1).mean().item() - own}
        found.append(near | {str(size): spans[of_spans == size].sum().item() for size in sizes[1:]})
    return found


def sizes_of(num_tokens: int) -> list[int]:
    """Return the sizes of the nodes of a text.

    >>> sizes_of(5)
    [1, 2, 4, 8]
    """
    return [1 << level for level in range((num_tokens - 1).bit_length() + 1)]


def span_sizes(num_tokens: int) -> Tensor:
    """Return the size of the span whose left half ends with each token.

    >>> span_sizes(5).tolist()
    [2, 4, 2, 8, 2]
    """
    place = torch.arange(1, num_tokens + 1)
    return 2 * (place & -place)


def draw_trees(content: dict[str, Any]) -> Any:
    """Return a figure: accuracy by density at each length, and what the densest tree reads of the longest texts."""
    lengths = list(content["models"])
    figure = new_figure(5.0 * (1 + len(lengths)), 4.5)
    *panels, reading = figure.subplots(1, 1 + len(lengths))
    for panel, length in zip(panels, lengths, strict=True):
        _draw_accuracy(panel, content["models"][length], content["bag_of_words"][length]["accuracy"])
        panel.set_title(f"the first {int(length):,} tokens")
    trees = {name: found for name, found in content["seeds"][lengths[-1]].items() if name.startswith("tree")}
    if trees:
        name, results = list(trees.items())[len(trees) // 2]
        _draw_reading(reading, name, [result["sizes"] for result in results])
    figure.suptitle("Equal training time: trees of spans, a band, dense attention")
    return figure


def _draw_accuracy(panel: Any, models: dict[str, Any], bag_of_words: float) -> None:
    trees = {name: result for name, result in models.items() if name.startswith("tree")}
    points = [(result["pairs_per_token"], _accuracy(result)) for result in trees.values()]
    panel.plot(*zip(*points, strict=True), color=COLORS["tree"], marker="o", label="trees") if points else None
    for (name, _), point in zip(trees.items(), points, strict=True):
        panel.annotate(name.removeprefix("tree, "), point, textcoords="offset points", xytext=(4, 6))
    for name in ("band", "dense"):
        if name in models:
            point = models[name]["pairs_per_token"], _accuracy(models[name])
            panel.plot(*point, color=COLORS[name], marker="s", linestyle="", label=name)
    panel.axhline(bag_of_words, color="0.4", linestyle=":", label="bag of words")
    panel.set(xlabel="scores a token in a head", ylabel="accuracy", xscale="log")
    panel.minorticks_off()
    scores = sorted({round(result["pairs_per_token"]) for result in models.values()})
    panel.set_xticks(scores, [f"{each:,}" for each in scores], fontsize="small")
    panel.legend(fontsize="small")


def _accuracy(result: dict[str, Any]) -> float:
    return next(iter(result["scores"].values()))["accuracy"]


def _draw_reading(panel: Any, name: str, of_seeds: Sequence[list[dict[str, float]]]) -> None:
    num_layers, sizes = len(of_seeds[0]), list(of_seeds[0][0])
    bottom = [0.0] * num_layers
    # light to dark: from what is near to the largest spans
    shades = [0.9 * number / max(1, len(sizes) - 1) for number in range(len(sizes))]
    for size, shade in zip(sizes, shades, strict=True):
        shares = [statistics.fmean(seed[layer][size] for seed in of_seeds) for layer in range(num_layers)]
        label = size if size in (ITSELF, "1", sizes[-1]) else None
        label = "1 token" if size == "1" else f"{int(size):,} tokens" if label and size != ITSELF else label
        color = str(0.95 - shade)
        panel.bar(range(1, num_layers + 1), shares, bottom=bottom, color=color, edgecolor="0.5", label=label)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    panel.set(xlabel="layer", ylabel="share of the attention of tokens", xticks=range(1, num_layers + 1))
    panel.set_title(f"{name}: sizes of the nodes read")
    # beside the bars, which fill the panel
    panel.set_xlim(0.5, num_layers + 1.6)
    panel.legend(fontsize="small", loc="center right")
