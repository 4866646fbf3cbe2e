"""The table and the picture of what mechanisms reach on ListOps."""

from typing import Any

from comparison.run_folder import results_table
from hf_efficient_attn.pictures import new_figure

COLUMNS = {
    "mechanism": ("mechanism", "{}"),
    "accuracy": ("accuracy", "{}"),
    "parameters": ("parameters", "{:,}"),
    "seconds_per_step": ("seconds a step", "{:.3f}"),
    "published": ("published, 2,000 tokens", "{}"),
}


def results_text(content: dict[str, Any]) -> str:
    """Return the table, and what to bear in mind."""
    rows = []
    for name, result in content["mechanisms"].items():
        spread = "" if result["deviation"] is None else f" ± {result['deviation']:.3f}"
        published = content["published"].get(name)
        labels = {"mechanism": name, "published": "–" if published is None else f"{published:.2f}%"}
        rows.append({**result, **labels, "accuracy": f"{result['accuracy']:.3f}{spread}"})
    settings, num = content["settings"], content["rows"]
    about = (
        f"{num['train']:,} expressions of {settings['min_tokens']:,} to {settings['max_tokens']:,} tokens to train on, "
        f"{num['test']:,} to test on; always telling the most frequent value: {content['most_frequent_value']:.3f}. "
        f"{settings['max_steps']:,} steps of {settings['tokens_per_step']:,} tokens, {len(settings['seeds'])} seed(s), "
        f"{settings['num_hidden_layers']} layers of width {settings['hidden_size']}. Published: Tay et al. "
        "(arXiv:2011.04006), of nystrom Xiong et al. (arXiv:2102.03902); other sizes, lengths and steps."
    )
    return "\n\n".join((results_table(COLUMNS, rows), about))


def draw_listops(content: dict[str, Any]) -> Any:
    """Return the picture: accuracy and time of a step, a bar for each mechanism."""
    names = list(content["mechanisms"])[::-1]
    figure = new_figure(11.0, 1.6 + 0.32 * len(names))
    accuracy, cost = figure.subplots(1, 2, sharey=True)
    results = [content["mechanisms"][name] for name in names]
    accuracy.barh(names, [each["accuracy"] for each in results], xerr=[each["deviation"] or 0 for each in results])
    accuracy.axvline(content["most_frequent_value"], color="#333333", linestyle="--", label="most frequent value")
    accuracy.set_xlabel("accuracy")
    accuracy.legend()
    cost.barh(names, [1000 * each["seconds_per_step"] for each in results], color="#ee8866")
    cost.set_xlabel("milliseconds of a training step")
    settings = content["settings"]
    figure.suptitle(f"ListOps of {settings['min_tokens']:,} to {settings['max_tokens']:,} tokens")
    return figure
