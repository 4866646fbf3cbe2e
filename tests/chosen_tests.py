"""Which tests of a file have been chosen: what is made once for all of them is made as far as they need it."""

import pytest


def words_for_scripts(request: pytest.FixtureRequest) -> list[str]:
    """Return what a script is told beside its folder: "thorough" if tests of this file that are so will be run."""
    of_this_file = [item for item in request.session.items if item.path == request.path]
    return ["thorough"] if any(item.get_closest_marker("thorough") for item in of_this_file) else []
