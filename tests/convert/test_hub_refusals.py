"""What the Hub answers, over real HTTP: each refusal in a sentence of its own, and without waiting."""

import json
import sys
import time
from http import HTTPStatus

import pytest
from distributed import Script
from hub_server import running_hub
from in_tree_models import in_tree

# asks a Hub, then none, and then one that is gone: this process, a fork, has its socket, too
SCRIPT = """
import json, os, sys, time, warnings
from pathlib import Path
import hf_efficient_attn as hea
from huggingface_hub import close_session, constants
warnings.simplefilter("ignore")
os.closerange(3, 1000)
sleeps, sleep = [], time.sleep
time.sleep = sleeps.append

def answers(names):
    found = {}
    for name in names:
        sleeps.clear()
        try:
            answer = type(hea.convert(name)).__name__
        except hea.CheckpointError as error:
            answer = str(error)
        found[name] = answer, sum(sleeps)
    print(json.dumps(found), flush=True)

answers(sys.argv[1:])
names = ["tester/model", "tester/none"]
constants.HF_HUB_OFFLINE = True
answers(names)
constants.HF_HUB_OFFLINE = False
while not Path("gone").exists():
    sleep(0.01)
# which would still be served
close_session()
answers(names)
"""
REFUSALS = {
    "tester/private": (HTTPStatus.UNAUTHORIZED, "Unauthorized"),
    "tester/gated": (HTTPStatus.FORBIDDEN, "GatedRepo"),
    "tester/busy": (HTTPStatus.TOO_MANY_REQUESTS, ""),
    "tester/failing": (HTTPStatus.INTERNAL_SERVER_ERROR, ""),
    "tester/teapot": (HTTPStatus.IM_A_TEAPOT, ""),
    "tester/late/model.safetensors": (HTTPStatus.INTERNAL_SERVER_ERROR, ""),
}
SENTENCES = {
    "tester/private": "answers 401: tester/private is private or does not exist, and the token",
    "tester/gated": "answers 403: tester/gated is gated",
    "tester/busy": "answers 429: too many requests",
    "tester/failing": "answers 500 for tester/failing: the Hub failed, the name may be correct",
    "tester/teapot": "answers 418 for tester/teapot",
    "tester/late": "answers 500 for tester/late",
    "tester/none": "answers 404: there is no model tester/none",
    "tester/empty": "answers 404: tester/empty has no config.json",
    "a/b/c": "'a/b/c' is not a folder here, and not a valid name of a model on the Hub",
    "x y": "not a valid name of a model on the Hub",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[str, float]]]:
    """Return the answers of a Hub that is asked, of none, and of one that nobody reaches, in one process."""
    place = tmp_path_factory.mktemp("client")
    with running_hub(tmp_path_factory.mktemp("hub")) as hub:
        for name in ("tester/model", "tester/late"):
            in_tree("bert").save_pretrained(hub.files(name))
        hub.files("tester/empty").mkdir(parents=True)
        (hub.files("tester/empty") / "README.md").write_text("nothing")
        hub.refusals.update(REFUSALS)
        words = [sys.executable, "-c", SCRIPT, "tester/model", *SENTENCES]
        printed, complaints = place / "printed", place / "complaints"
        printed.touch()
        client = Script(words, printed, complaints, place, hub.environment())
        # what is asked behind two lines finds nobody
        while client.process.is_alive() and printed.read_text().count("\n") < 2:
            time.sleep(0.01)
    (place / "gone").touch()
    client.communicate(timeout=200)
    assert client.returncode == 0, complaints.read_text()
    lines = printed.read_text().splitlines()
    return dict(zip(("asked", "offline", "unreachable"), map(json.loads, lines), strict=True))


@pytest.mark.parametrize("name", SENTENCES)
def test_refusals(outcomes: dict[str, dict[str, tuple[str, float]]], name: str) -> None:
    sentence, _ = outcomes["asked"][name]
    assert SENTENCES[name] in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("offline", "tester/none is neither a folder here nor in the cache, and HF_HUB_OFFLINE is set"),
        ("unreachable", "tester/none is neither a folder here nor in the cache, and the Hub (http://127.0.0.1:"),
    ],
)
def test_a_silent_hub(outcomes: dict[str, dict[str, tuple[str, float]]], how: str, sentence: str) -> None:
    """What was downloaded before is converted all the same."""
    assert outcomes["asked"]["tester/model"][0] == outcomes[how]["tester/model"][0] == "SparseTransformerModel"
    found, seconds = outcomes[how]["tester/none"]
    assert found.startswith(sentence)
    assert ("cannot be" in found) == (how == "unreachable")
    # a question or two; the downloads of transformers ask again and again, and sleep for 23 seconds in between
    assert seconds < 5
