"""`transformers serve` completes texts with models of this package over HTTP, and `transformers chat` talks to it.

The server imports nothing of ours by itself: it runs the stub that is saved with a model.
"""

import json
import os
import subprocess
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DECODERS, ENCODER_DECODERS, WRITERS
from neighbours.saved_models import save_model
from neighbours.servers import COMMAND, SECONDS, Server, serving, streamed_texts

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
# a message is heard between w7 and w8, and answered after w9
TEMPLATE = """\
{% for message in messages %}{{ 'w7 ' + message['content'] + ' w8 ' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'w9' }}{% endif %}"""
PROMPT = ["w7", "w1", "w2", "w3", "w8", "w9"]
TOKENS = 6
MESSAGES = [{"role": "user", "content": "w1 w2 w3"}]
every_family = pytest.mark.parametrize("family", DECODERS)


def save_with_template(folder: Path, family: str) -> Any:
    """Write a model that writes no token that ends its text."""
    model = save_model(folder, WRITERS[family])
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    model.generation_config.eos_token_id = None
    model.generation_config.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of every model that it is asked for."""
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


def completed(model: Any, words: list[str]) -> list[str]:
    """Return the words that the model itself says after these."""
    ids = torch.tensor([[int(word[1:]) + 5 for word in words]])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    return [f"w{token - 5}" for token in said[0, len(words) :].tolist() if token >= 5]


@every_family
def test_completions(family: str, server: Server, tmp_path: Path) -> None:
    """By messages, at once and word by word, and by the start of a text."""
    model = save_with_template(tmp_path, family)
    asked = {"model": str(tmp_path), "max_tokens": TOKENS, "temperature": 0}
    answer = json.loads(server.ask("/v1/chat/completions", {**asked, "messages": MESSAGES, "stream": False}))
    expected = completed(model, PROMPT)
    assert len(expected) > 1
    assert answer["choices"][0]["message"]["content"].split() == expected
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == TOKENS
    pieces = streamed_texts(server.ask("/v1/chat/completions", {**asked, "messages": MESSAGES, "stream": True}))
    assert "".join(pieces).split() == expected
    assert len(pieces) == len(expected)
    answer = json.loads(server.ask("/v1/completions", {**asked, "prompt": "w1 w2 w3"}))
    assert answer["choices"][0]["text"].split() == completed(model, ["w1", "w2", "w3"])


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_encoder_decoders_lose_words(family: str, server: Server, tmp_path: Path) -> None:
    """The server cuts as many tokens off an answer as the question has, which only decoders repeat."""
    model = save_with_template(tmp_path, family)
    asked = {"model": str(tmp_path), "max_tokens": TOKENS, "temperature": 0}
    answer = json.loads(server.ask("/v1/completions", {**asked, "prompt": "w1 w2 w3"}))
    ids = torch.tensor([[6, 7, 8, 2]])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)[0]
    assert len(said) == 1 + TOKENS
    assert answer["choices"][0]["text"].split() == [f"w{token - 5}" for token in said[len(ids[0]) :].tolist()]


@every_family
def test_chat(family: str, server: Server, tmp_path: Path) -> None:
    """Without a terminal it reads what is said to it from a pipe."""
    model = save_with_template(tmp_path / "model", family)
    flags = [f"max_new_tokens={TOKENS}", "do_sample=False"]
    # the answer ends at the limit, and it asks whether to go on
    said = subprocess.run(
        [*COMMAND, "chat", str(tmp_path / "model"), server.url, *flags],
        input="w1 w2 w3\nn\n!exit\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        # offline, huggingface_hub asks no server, not even one on this machine
        env={**os.environ, "HF_HUB_OFFLINE": "0"},
        timeout=SECONDS,
    )
    assert said.returncode == 0, said.stderr[-3000:]
    assert " ".join(completed(model, PROMPT)) in said.stdout
    assert "Continue generating?" in said.stdout


@pytest.mark.parametrize("family", ["sparse_transformer", "sparsified"])
def test_continuous_batching_is_refused(family: str, tmp_path: Path) -> None:
    """It computes full attention over pages of keys; the client reads why not, and gets no text."""
    save_with_template(tmp_path / "model", family)
    # a cache of its default size takes most of the memory
    cache = ("--cb-num-blocks", "8", "--cb-block-size", "32", "--cb-max-batch-tokens", "64")
    options = ("--continuous-batching", "--attn-implementation", "sdpa", *cache)
    asked = {"model": str(tmp_path / "model"), "messages": MESSAGES, "max_tokens": TOKENS}
    with serving(tmp_path / "server", *options) as server:
        with pytest.raises(urllib.error.HTTPError):
            server.ask("/v1/chat/completions", asked)
        # the worker has died, and says why from now on
        with pytest.raises(urllib.error.HTTPError) as refusal:
            server.ask("/v1/chat/completions", asked)
        said = json.loads(refusal.value.read())
    assert refusal.value.code == 503
    # behind what the server says of itself
    why = said["error"].split(": ", 1)[1]
    assert "Continuous batching" in why or "attention_pattern" in why
