"""The page of `explore`: its parts, which lie in `explore_page/`, and its data in one HTML file."""

import json
from importlib.resources import files
from typing import Any

STYLES = ("page.css", "views.css")
# later ones use what earlier ones define
SCRIPTS = (
    "intervals.js",
    "patterns.js",
    "random_numbers.js",
    "random_blocks.js",
    "span_tree.js",
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


def _part(name: str) -> str:
    return (files(__package__) / "explore_page" / name).read_text(encoding="utf-8")
