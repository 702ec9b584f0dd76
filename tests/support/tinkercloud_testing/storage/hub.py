"""A hub for models, with as much of Hugging Face's API as an upload of small files needs."""

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """The uploaded files, by repository and name."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def answer(self, path: str, body: bytes) -> dict[str, Any] | None:
        """Return the response to a request; None for 404."""
        if path == "/api/whoami-v2":
            return {"name": "me", "type": "user", "orgs": []}
        if path == "/api/repos/create":
            name = f"me/{json.loads(body)['name']}"
            self.files.setdefault(name, {})
            return {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": f["path"], **modes} for f in json.loads(body)["files"]]}
        if "/commit/" in path:
            repo = path.removeprefix("/api/models/").partition("/commit/")[0]
            self._commit(repo, body)
            return {"commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1" * 40}
        return None

    def _commit(self, repo: str, body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                self.files[repo][entry["value"]["path"]] = content


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond()

    def do_HEAD(self) -> None:
        self._respond()

    def _respond(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        answer = self.hub.answer(self.path.partition("?")[0], self.rfile.read(size))
        content = json.dumps(answer if answer is not None else {"error": "not found"}).encode()
        self.send_response(200 if answer is not None else 404)
        if answer is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        """Log nothing."""


@contextlib.contextmanager
def a_hub() -> Iterator[Hub]:
    """Serve an empty hub on this machine."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
