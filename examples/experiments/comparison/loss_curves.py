"""The picture of compared blocks: the loss of every block by step and by second of training."""

from typing import Any

from matplotlib.ticker import MaxNLocator

from hf_efficient_attn.pictures import new_figure

AXES = {"step": "training step", "train_seconds": "training time (s), without evaluation"}


def draw_loss_curves(histories: dict[str, list[dict[str, float]]], bits_per_byte_of_one_nat: float) -> Any:
    """Return two panels, per step and per second: training loss (thin) and held-out loss (dots) of each block.

    Args:
        histories: block → entries with `step`, `train_seconds`, and `loss` or `eval_loss`.
        bits_per_byte_of_one_nat: scale of the right-hand axis, which applies to the held-out loss.
    """
    figure = new_figure(11, 4.5)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (column, label) in zip(panels, AXES.items(), strict=True):
        for index, (block, history) in enumerate(histories.items()):
            _draw_block(panel, block, history, column, f"C{index}")
        panel.set_xlabel(label)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("cross-entropy (nats per token)")
    panels[0].legend(title="dots: held-out text; thin: training")
    right = panels[1].secondary_yaxis(
        "right",
        functions=(lambda nats: nats * bits_per_byte_of_one_nat, lambda bits: bits / bits_per_byte_of_one_nat),
    )
    right.set_ylabel("bits per byte of held-out text")
    figure.suptitle("Loss per step and per second of training")
    return figure


def _draw_block(panel: Any, block: str, history: list[dict[str, float]], column: str, color: str) -> None:
    for name, style in (("loss", {"alpha": 0.4, "linewidth": 1}), ("eval_loss", {"marker": "o", "label": block})):
        points = [(entry[column], entry[name]) for entry in history if name in entry]
        if points:
            panel.plot(*zip(*points, strict=True), color=color, markersize=4, **style)
