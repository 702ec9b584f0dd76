"""A browser of the console, without scripts."""

import html
import json
import re
from collections.abc import Mapping
from datetime import datetime
from urllib.parse import urlencode, urlsplit

import httpx
from typer.testing import CliRunner

from tinkercloud_api.cli import app
from tinkercloud_testing.serving.servers import API_KEY, Server

SCRIPT = '<script>alert("x")</script>\u202e\x07'
"""A name that is an attack."""
FORM_TOKEN = re.compile(r'name="form_token" value="([0-9a-f]{64})"')


class Browser:
    """Keeps cookies, sends forms and follows no redirects, like a browser of these pages."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.http = httpx.Client(base_url=server.url, timeout=60)

    def get(self, path: str) -> httpx.Response:
        """Open a page."""
        return self.http.get(path)

    def send(self, path: str, fields: Mapping[str, str]) -> httpx.Response:
        """Send a form, with these fields only."""
        return self.http.post(path, data=fields)

    def submit(self, path: str, **fields: str) -> httpx.Response:
        """Send a form of the session."""
        return self.send(path, {"form_token": self.form_token(), **fields})

    def log_in(self, key: str = API_KEY) -> "Browser":
        """Open a session with the link that the command prints."""
        path = link(self.server, key)
        token = path.partition("link=")[2]
        assert f'name="link" value="{token}"' in self.get(path).text
        assert self.send("/console/login", {"link": token}).status_code == 303
        return self

    def form_token(self) -> str:
        """Return what the forms of the session hold."""
        return str(FORM_TOKEN.findall(self.get("/console/account").text)[0])


def link(server: Server, key: str = API_KEY) -> str:
    """Return the path of the link that `tinkercloud console` prints."""
    command = ["console", "--base-url", server.url, "--api-key", key, "--json"]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    parts = urlsplit(json.loads(printed.stdout)["url"])
    return f"{parts.path}?{parts.query}"


def read_only_browser(server: Server, owner: str = "bootstrap") -> Browser:
    """Return a browser that is logged in with a read-only key of an owner."""
    command = ("keys", "create", "reader", "--owner", owner, "--role", "read-only", "--json")
    return Browser(server).log_in(json.loads(server.command(*command))["key"])


def events(server: Server, since: datetime, words: str, key: str = API_KEY) -> list[str]:
    """Return the events of the audit log, since a time, whose entries contain some words."""
    query = urlencode({"since": since.isoformat()})
    entries = server.request("GET", f"/api/v1/audit?{query}", key=key).json()["entries"]
    return [each["event"] for each in entries if words in json.dumps(each)]


def text(answer: httpx.Response) -> str:
    """Return a page with its entities as characters."""
    return html.unescape(answer.text)
