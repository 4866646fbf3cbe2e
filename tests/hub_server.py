"""A Hub that takes a push: the routes `huggingface_hub` needs, over real HTTP on the loopback, files on disk.

One branch (`main`) whose commits stay, one user, models only. As on the real Hub, weights travel by LFS, the rest
inside the commit, and a card whose metadata cannot be read is refused.

    with running_hub(tmp_path) as hub:
        subprocess.run([sys.executable, "push.py"], env=hub.environment(), check=True)
        assert (hub.files("tester/name") / "model.safetensors").exists()

huggingface_hub reads its environment when it is imported, so clients run in processes of their own.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

USER, TOKEN = "tester", "hf_token_of_the_test"
REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
# beside the users
COMMITS = ".commits"
LFS_SUFFIXES = (".safetensors", ".bin", ".pt")


def card_errors(content: str) -> list[str]:
    """Return what is wrong with the metadata of a card: here, that they are missing or no YAML."""
    block = REGEX_YAML_BLOCK.search(content)
    try:
        is_right = block is not None and isinstance(yaml.safe_load(block.group(2)), dict)
    except yaml.YAMLError:
        is_right = False
    return [] if is_right else ["The metadata of the card cannot be read."]


class HubError(Exception):
    """An answer other than 200; `code` is the `X-Error-Code` that the client turns into an exception."""

    def __init__(self, status: HTTPStatus, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


@dataclass
class Hub:
    """A running server: `url`, and `folder` with one folder per user and repository.

    `refusals`: status and error code instead of every file of a repository ("user/name"), or of one file of it
    ("user/name/file").
    """

    url: str
    folder: Path
    refusals: dict[str, tuple[HTTPStatus, str]]

    def files(self, repo: str) -> Path:
        """Return the folder that holds the files of `repo`."""
        return self.folder / repo

    def environment(self) -> dict[str, str]:
        """Return the environment of a client process: this Hub and no other, nothing cached, one thread."""
        own = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.folder / ".client"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        switched_off = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE")
        return {**{name: value for name, value in os.environ.items() if name not in switched_off}, **own}


@contextlib.contextmanager
def running_hub(folder: Path, handler: type[BaseHTTPRequestHandler] | None = None) -> Iterator[Hub]:
    """Serve `folder` on a free port of 127.0.0.1 until the block ends; `handler` is `HubHandler`, or a part of it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler or HubHandler)
    server.folder, server.refusals, server.lock = folder, {}, threading.Lock()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_port}", folder, server.refusals)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class HubHandler(BaseHTTPRequestHandler):
    """One request at a time: `ROUTES` maps method and path to the method that answers it."""

    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        self.body = self.read_body()
        path = unquote(urlsplit(self.path).path)
        try:
            for method, pattern, action in ROUTES:
                match = re.fullmatch(pattern, path)
                if match and method == self.command.replace("HEAD", "GET"):
                    with self.server.lock:
                        return action(self, **match.groupdict())
            raise HubError(HTTPStatus.NOT_FOUND, "NoSuchRoute")
        except HubError as error:
            self.send(json.dumps({"error": str(error)}).encode(), error.status, {"X-Error-Code": error.code})

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def whoami(self) -> None:
        self.check_token()
        self.send_json({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self) -> None:
        self.check_token()
        wanted = json.loads(self.body)
        repo = f"{wanted.get('organization') or USER}/{wanted['name']}"
        exists = (self.server.folder / repo).exists()
        (self.server.folder / repo).mkdir(parents=True, exist_ok=True)
        self.send_json({"url": f"{self.url}/{repo}"}, HTTPStatus.CONFLICT if exists else HTTPStatus.OK)

    def validate_card(self) -> None:
        errors = card_errors(json.loads(self.body)["content"])
        answer = {"errors": [{"message": error} for error in errors], "warnings": []}
        self.send_json(answer, HTTPStatus.BAD_REQUEST if errors else HTTPStatus.OK)

    def preupload(self, repo: str) -> None:
        """Say which files of the coming commit go by LFS."""
        self.check_token()
        self.repo_folder(repo)
        modes = {True: "lfs", False: "regular"}
        files = [
            {"path": path, "uploadMode": modes[path.endswith(LFS_SUFFIXES)], "shouldIgnore": False}
            for path in (file["path"] for file in json.loads(self.body)["files"])
        ]
        self.send_json({"files": files})

    def lfs_batch(self, repo: str) -> None:
        """Say where to PUT each large file; the address needs no token, as the presigned ones of the real Hub."""
        self.check_token()
        objects = [
            {
                "oid": wanted["oid"],
                "size": wanted["size"],
                "actions": {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}"}},
            }
            for wanted in json.loads(self.body)["objects"]
        ]
        self.send_json({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(HTTPStatus.BAD_REQUEST, "WrongHash")
        path = self.lfs_path(oid)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(self.body)
        self.send(b"")

    def commit(self, repo: str) -> None:
        """Apply the operations of the commit, one JSON object per line, all at once and only if its card is right."""
        self.check_token()
        folder = self.repo_folder(repo)
        with tempfile.TemporaryDirectory(dir=self.server.folder) as beside:
            coming = shutil.copytree(folder, Path(beside) / "coming")
            for operation in map(json.loads, self.body.splitlines()):
                self.apply(coming, operation["key"], operation["value"])
            card = coming / "README.md"
            if card.is_file() and (errors := card_errors(card.read_text(encoding="utf-8"))):
                raise HubError(HTTPStatus.BAD_REQUEST, "; ".join(errors))
            oid = commit_id(coming)
            shutil.copytree(coming, self.server.folder / COMMITS / oid, dirs_exist_ok=True)
            folder.rename(Path(beside) / "gone")
            coming.rename(folder)
        self.send_json({"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repo}/commit/{oid}"})

    def apply(self, folder: Path, kind: str, value: dict[str, Any]) -> None:
        """Apply one operation of a commit."""
        if kind == "header":
            return
        path = file_path(folder, value["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "file":
            path.write_bytes(base64.b64decode(value["content"]))
        elif kind == "lfsFile":
            shutil.copyfile(self.lfs_path(value["oid"]), path)
        elif kind == "deletedFile":
            path.unlink()
        else:
            raise HubError(HTTPStatus.NOT_IMPLEMENTED, kind)

    def info(self, repo: str, revision: str | None) -> None:
        folder, commit = self.at_revision(repo, revision or "main")
        siblings = [{"rfilename": name} for name in file_names(folder)]
        self.send_json({"id": repo, "sha": commit, "private": False, "tags": [], "siblings": siblings})

    def tree(self, repo: str, revision: str, under: str | None) -> None:
        folder, _ = self.at_revision(repo, revision)
        prefix = f"{under}/" if under else ""
        names = [name for name in file_names(folder) if name.startswith(prefix)]
        if not names:
            raise HubError(HTTPStatus.NOT_FOUND, "EntryNotFound")
        of_all = {"type": "file", "oid": "0" * 40}
        self.send_json([{"path": name, "size": (folder / name).stat().st_size, **of_all} for name in names])

    def resolve(self, repo: str, revision: str, name: str) -> None:
        for refused in (repo, f"{repo}/{name}"):
            if refused in self.server.refusals:
                raise HubError(*self.server.refusals[refused])
        folder, commit = self.at_revision(repo, revision)
        path = file_path(folder, name)
        if not path.is_file():
            raise HubError(HTTPStatus.NOT_FOUND, "EntryNotFound")
        content = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit}
        self.send(content, headers=headers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def lfs_path(self, oid: str) -> Path:
        return self.server.folder / ".lfs" / oid

    def repo_folder(self, repo: str) -> Path:
        folder = self.server.folder / repo
        if not folder.is_dir():
            raise HubError(HTTPStatus.NOT_FOUND, "RepoNotFound")
        return folder

    def at_revision(self, repo: str, revision: str) -> tuple[Path, str]:
        """Return the folder of a commit, or of what `main` is now, and the commit's hash."""
        folder = self.repo_folder(repo)
        commit = commit_id(folder)
        if revision in ("main", commit):
            return folder, commit
        kept = file_path(self.server.folder / COMMITS, revision)
        if not kept.is_dir():
            raise HubError(HTTPStatus.NOT_FOUND, "RevisionNotFound")
        return kept, revision

    def check_token(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise HubError(HTTPStatus.UNAUTHORIZED, "Unauthorized")

    def read_body(self) -> bytes:
        body = self.rfile.read(length := int(self.headers.get("Content-Length", 0)))
        assert len(body) == length, "the client is gone"
        return body

    def send_json(self, answer: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send(json.dumps(answer).encode(), status, {"Content-Type": "application/json"})

    def send(self, content: bytes, status: HTTPStatus = HTTPStatus.OK, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent: pytest shows what fails."""


ROUTES = [
    ("GET", "/api/whoami-v2", HubHandler.whoami),
    ("POST", "/api/repos/create", HubHandler.create),
    ("POST", "/api/validate-yaml", HubHandler.validate_card),
    ("POST", f"/api/models/{REPO}/preupload/main", HubHandler.preupload),
    ("POST", f"/api/models/{REPO}/commit/main", HubHandler.commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", HubHandler.lfs_batch),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})", HubHandler.lfs_put),
    ("GET", f"/api/models/{REPO}(/revision/(?P<revision>[^/]+))?", HubHandler.info),
    ("GET", f"/api/models/{REPO}/tree/(?P<revision>[^/]+)(/(?P<under>.+))?", HubHandler.tree),
    ("GET", f"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", HubHandler.resolve),
]


def file_path(folder: Path, name: str) -> Path:
    """Return the path of file `name`, which may not lead out of `folder`."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise HubError(HTTPStatus.BAD_REQUEST, "BadPath")
    return path


def file_names(folder: Path) -> list[str]:
    """Return the names of all files under `folder`, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def commit_id(folder: Path) -> str:
    """Return 40 hex digits that change with any file."""
    digest = hashlib.sha1()
    for name in file_names(folder):
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    return digest.hexdigest()
