"""The picture of a run: loss of every block per step and per second of training."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend is chosen first
from matplotlib.ticker import MaxNLocator  # noqa: E402

AXES = {"step": "training step", "train_seconds": "training time (s), without evaluation"}


def draw_loss_curves(histories: dict[str, list[dict[str, float]]], bits_per_byte_of_one_nat: float, file: Path) -> None:
    """Write to `file` two panels, per step and per second: training loss (thin) and held-out loss (dots) of each block.

    Args:
        histories: block → entries with `step`, `train_seconds`, and `loss` or `eval_loss`.
        bits_per_byte_of_one_nat: scale of the right-hand axis, which holds for the held-out loss.
    """
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for panel, (column, label) in zip(panels, AXES.items(), strict=True):
        for index, (block, history) in enumerate(histories.items()):
            _draw_block(panel, block, history, column, f"C{index}")
        panel.set_xlabel(label)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("cross-entropy (nats per token)")
    panels[0].legend(title="dots: held-out text; thin: training")
    right = panels[1].secondary_yaxis(
        "right",
        functions=(lambda nats: nats * bits_per_byte_of_one_nat, lambda bits: bits / bits_per_byte_of_one_nat),
    )
    right.set_ylabel("bits per byte of held-out text")
    figure.suptitle("Loss per step and per second of training")
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _draw_block(panel: plt.Axes, block: str, history: list[dict[str, float]], column: str, color: str) -> None:
    training = [(entry[column], entry["loss"]) for entry in history if "loss" in entry]
    held_out = [(entry[column], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    if training:
        panel.plot(*zip(*training, strict=True), color=color, alpha=0.4, linewidth=1)
    if held_out:
        panel.plot(*zip(*held_out, strict=True), color=color, marker="o", markersize=4, label=block)
