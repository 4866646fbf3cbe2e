"""The page of `explore`: its parts, which lie in `explore_page/`, and its data in one HTML file."""

import json
from base64 import b64encode
from importlib.resources import files
from typing import Any

from torch import Tensor

STYLES = ("page.css", "views.css")
# of tokens, layers and heads on the page, which stays fluent with so many
MOST = {"tokens": 262_144, "layers": 128, "heads": 256}
# later ones use what earlier ones define
SCRIPTS = (
    "intervals.js",
    "patterns.js",
    "random_numbers.js",
    "random_blocks.js",
    "span_tree.js",
    "interleaved_span_tree.js",
    "grids.js",
    "kinds.js",
    "expression.js",
    "page.js",
    "schedule.js",
    "counting.js",
    "tiles.js",
    "matrix.js",
    "matrix_drawing.js",
    "backend_facts.js",
    "pattern_view.js",
    "model_data.js",
    "memberships.js",
    "heads_map.js",
    "text_view.js",
    "start.js",
)


def render_page(data: dict[str, Any]) -> str:
    """Return the HTML of the page that shows `data`, which are JSON types; it loads nothing from anywhere."""
    parts = {
        "{{style}}": "\n".join(map(_part, STYLES)),
        "{{script}}": "\n".join(map(_part, SCRIPTS)),
        "{{data}}": embedded(data),
    }
    before, *rest = _part("page.html").split("{{")
    pages = [before]
    for piece in rest:
        name, _, after = piece.partition("}}")
        pages += [parts[f"{{{{{name}}}}}"], after]
    return "".join(pages)


def embedded(data: Any) -> str:
    r"""Return JSON that can stand within a script element: no text in it can end the element, or begin another.

    >>> embedded("</script><!--")
    '"\\u003c/script>\\u003c!--"'
    """
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def packed(tensor: Tensor, dtype: str) -> str:
    """Return numbers as the page reads them: little-endian, of a dtype of numpy such as "<f4", in base64.

    >>> import torch
    >>> packed(torch.tensor([1, 258]), "<u4")
    'AQAAAAIBAAA='
    """
    return b64encode(tensor.contiguous().numpy().astype(dtype).tobytes()).decode()


def _part(name: str) -> str:
    return (files(__package__) / "explore_page" / name).read_text(encoding="utf-8")
