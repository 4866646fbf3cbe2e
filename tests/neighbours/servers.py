"""`transformers serve` in a process of its own, asked over HTTP."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "transformers.cli.transformers"]
SECONDS = 120


@dataclass(frozen=True)
class Server:
    """A server that answers at `url`."""

    url: str

    def ask(self, path: str, body: dict[str, Any]) -> str:
        """Return the text of the answer to a POST.

        Raises:
            HTTPError: the server says that it cannot.
        """
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return str(answer.read().decode())


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    """Start a server that trusts the code of the models that it is asked for; what it says is `folder`/log."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    # code of models is copied into a cache, which is this server's alone
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules")}
    words = ["serve", "--port", str(port), "--device", "cpu", "--trust-remote-code", *options]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([*COMMAND, *words], stdout=log, stderr=log, cwd=folder, env=environment)
        try:
            url = f"http://localhost:{port}"
            wait_for(url, process, folder / "log")
            yield Server(url)
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    """Wait until the server answers; it imports transformers first."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=SECONDS).close()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server does not answer:\n{log.read_text()[-3000:]}") from error
            time.sleep(0.2)


def streamed_texts(answer: str) -> list[str]:
    """Return the pieces of text of a streamed answer, which is server-sent events of chunks."""
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: ")]
    assert not any("error" in chunk for chunk in chunks), answer
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    return [text for text in texts if text]
