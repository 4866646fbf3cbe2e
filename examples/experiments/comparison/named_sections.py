"""The picture of named sections: the loss of training, and what every model names in held-out pages."""

from typing import Any

from hf_efficient_attn.pictures import new_figure


def draw_named(content: dict[str, Any]) -> Any:
    """Return two panels: training loss per step, and the share named of a title, beside words alone."""
    figure = new_figure(12, 4.5)
    losses, named = figure.subplots(1, 2)
    for index, result in enumerate(content["kinds"].values()):
        losses.plot(*zip(*result["losses"], strict=True), color=f"C{index}", label=result["name"])
        named.barh(result["name"], result["named_of_a_title"], color=f"C{index}")
    losses.set(xlabel="training step", ylabel="training loss (nats)", xlim=(0, None))
    losses.legend(fontsize="small")
    named.axvline(
        content["words"]["named_of_a_title"], color="black", linestyle="--", label="words of a section (TF-IDF)"
    )
    named.invert_yaxis()
    named.set(xlabel="share of the sections named, mean over titles, held-out pages", xlim=(0, 1))
    # beside the bars, whose ends say something
    named.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    figure.suptitle("Which title had this section? Equal shape, texts and steps")
    return figure
