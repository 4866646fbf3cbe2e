"""A Hub that loses connections halfway."""

import re
from http import HTTPStatus
from typing import Any

from hub_server import HubHandler


def handler_that_cuts(cuts: list[str]) -> type[HubHandler]:
    """Return a handler that loses a connection, once for each of `cuts`.

    "GET" is the download of a large file, "PUT" its upload, "POST" a commit.
    """

    class CuttingHandler(HubHandler):
        def answer(self) -> None:
            if self.is_cut("PUT", "/lfs/") or self.is_cut("POST", "/commit/"):
                self.rfile.read(int(self.headers["Content-Length"]) // 2)
                return
            super().answer()

        do_GET = do_HEAD = do_POST = do_PUT = answer

        def send(self, content: bytes, status: HTTPStatus = HTTPStatus.OK, headers: Any = None) -> None:
            rest = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if rest is not None and "/resolve/" in self.path:
                # the client has the beginning
                content, status = content[int(rest[1]) :], HTTPStatus.PARTIAL_CONTENT
            if self.is_cut("GET", ".safetensors"):
                write = self.wfile.write
                # headers promise all of it
                self.wfile.write = lambda sent: write(sent[: len(sent) // 2] if sent is content else sent)
            super().send(content, status, headers)

        def is_cut(self, method: str, part: str) -> bool:
            if self.command != method or part not in self.path or method not in cuts:
                return False
            cuts.remove(method)
            self.close_connection = True
            return True

    return CuttingHandler
