"""The Hub of the tests refuses a commit as the real one does: whole, and nothing has changed."""

import base64
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from faults.jobs import contents, shown_commit
from hub_server import TOKEN, Hub, running_hub

REPO = "tester/name"


def commit(hub: Hub, files: dict[str, str]) -> None:
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in files.items()}
    lines = [{"key": "file", "value": {"path": name, "content": content}} for name, content in encoded.items()]
    body = "\n".join(map(json.dumps, lines)).encode()
    wanted = f"{hub.url}/api/models/{REPO}/commit/main"
    urllib.request.urlopen(urllib.request.Request(wanted, body, {"Authorization": f"Bearer {TOKEN}"})).close()


def test_a_wrong_card_changes_nothing(tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub:
        hub.files(REPO).mkdir(parents=True)
        commit(hub, {"config.json": "{}", "README.md": "---\nlicense: mit\n---\n"})
        before = contents(hub.files(REPO)), shown_commit(hub, REPO)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            commit(hub, {"config.json": "[]", "more/notes.txt": "new", "README.md": "---\nlicense: [\n---\n"})
        assert (contents(hub.files(REPO)), shown_commit(hub, REPO)) == before
        commit(hub, {"config.json": "[]"})
        assert contents(hub.files(REPO)).keys() == before[0].keys()
        assert (hub.files(REPO) / "config.json").read_text() == "[]"
