"""A hub from which a model is downloaded, with as much of Hugging Face's API as that needs."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from urllib.parse import urlsplit


def _open_gate() -> Event:
    gate = Event()
    gate.set()
    return gate


@dataclass
class ModelHub:
    """A hub with one model, `acme/tiny`, which requires a token."""

    folder: Path
    token: str = "hf_granted"
    url: str = ""
    served: list[str] = field(default_factory=list)
    """Names of files whose content was sent."""
    revisions: list[str] = field(default_factory=list)
    """Those whose description was asked for."""
    may_send: Event = field(default_factory=_open_gate)
    """While it is not set, weights are held back."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment of programs that use the hub."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": self.token, "HF_HUB_OFFLINE": "0"}

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return the response to a request: its status, headers and body."""
        files = {
            str(path.relative_to(self.folder)): path
            for path in self.folder.rglob("*")
            if path.is_file()
        }
        match path.split("/"):
            case ["", "api", "models", "acme", "tiny", "revision", revision]:
                self.revisions.append(revision)
                siblings = [{"rfilename": name} for name in files]
                return _json({"id": "acme/tiny", "sha": "0" * 40, "siblings": siblings})
            case ["", "api", "models", "acme", "tiny", "tree", _]:
                return _json([_entry(name, path) for name, path in files.items()])
            case ["", "acme", "tiny", "resolve", _, *name]:
                content = files["/".join(name)].read_bytes()
                etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
                return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": "0" * 40}, content
            case _:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"


def _entry(name: str, path: Path) -> dict[str, object]:
    oid = hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": oid}


def _json(content: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()


def _handler_of(hub: ModelHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            status, headers, body = hub.answer(path)
            if self.headers.get("Authorization") != f"Bearer {hub.token}":
                status, headers, body = 401, {"X-Error-Code": "GatedRepo"}, b"{}"
            if self.command == "GET" and path.endswith(".safetensors"):
                hub.may_send.wait()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                hub.served.append(path.rpartition("/")[2])
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_arguments: object) -> None: ...

    return Handler


@contextlib.contextmanager
def a_model_hub(folder: Path) -> Iterator[ModelHub]:
    """Serve the model in a folder on this machine."""
    hub = ModelHub(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.may_send.set()
        server.shutdown()
        server.server_close()
