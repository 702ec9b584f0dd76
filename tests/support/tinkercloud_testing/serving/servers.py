"""A real local server: the `tinkercloud` command, its heads and its state folder."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar

import tinker
from prometheus_client.parser import text_string_to_metric_families

from tinkercloud_protocol.wire.routes import HEAD_METRICS
from tinkercloud_testing.clients.sdk_clients import SdkClients
from tinkercloud_testing.harness.ports import free_port
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS, wait_until
from tinkercloud_testing.serving import warm_processes
from tinkercloud_testing.serving.warm_processes import WarmProcess
from tinkercloud_testing.serving.warm_python import warm_python

PROGRAM = "tinkercloud_api"
API_KEY = "tml-the-first-owner-of-this-server"

TRAINERS: Mapping[str, Mapping[str, str]] = {
    "torch": {},
    "torch-2": {"TINKERCLOUD_TRAINER__RANKS": "2"},
    "torch-sharded": {"TINKERCLOUD_TRAINER__RANKS": "2", "TINKERCLOUD_TRAINER__SHARDED": "true"},
    "megatron-tp2": {
        "TINKERCLOUD_TRAINER__BACKEND": "megatron",
        "TINKERCLOUD_TRAINER__RANKS": "2",
        "TINKERCLOUD_TRAINER__TENSOR_PARALLEL": "2",
    },
}
"""Server settings by the trainer of heads: in the head's process, or with two ranks."""


NOT_DURABLE = {"TINKERCLOUD_DURABILITY__LEVEL": "none"}
"""Server settings with which a killed head loses its runs."""


@dataclass
class Answer:
    """The response to a plain HTTP request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object."""
        content = json.loads(self.body)
        assert isinstance(content, dict)
        return content

    @property
    def detail(self) -> str:
        """Return the message of an error."""
        return str(self.json()["detail"])


@dataclass
class Server:
    """A server. `start` and `stop` may be repeated; the state folder and the port remain."""

    warm_python: ClassVar[Path | None] = None
    """Socket of the warm Python in which servers, their commands and heads start; None if each has
    an interpreter of its own."""

    models: Mapping[str, Path]
    state_dir: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | WarmProcess | None = None
    clients: SdkClients = field(default_factory=SdkClients)

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """The output so far."""
        return (self.state_dir / "server.log").read_text()

    def start(self) -> None:
        """Start it and wait until it is healthy."""
        self.state_dir.mkdir(parents=True, exist_ok=True)
        arguments = [f"--model={name}={path}" for name, path in self.models.items()]
        with (self.state_dir / "server.log").open("ab") as log:
            self.process = process = self.launched(
                PROGRAM, ["serve", *arguments], self.environment(), log.fileno()
            )
        wait_until(lambda: self.is_healthy() or process.poll() is not None, "the server")
        assert process.poll() is None, self.log

    @classmethod
    def launched(
        cls, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: int
    ) -> subprocess.Popen[bytes] | WarmProcess:
        """Start a module, in a fork of the warm Python if there is one.

        Args:
            module: The module of a server or a head.
            arguments: Its arguments.
            environment: Its whole environment.
            log: The open file of its output.
        """
        if cls.warm_python is not None:
            files = {1: log, 2: log}
            return WarmProcess(cls.warm_python, module, arguments, environment, files)
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def environment(self) -> dict[str, str]:
        """Return the environment of its commands."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TINKERCLOUD_")}
        own = {
            "TINKERCLOUD_STATE_DIR": str(self.state_dir),
            "TINKERCLOUD_PORT": str(self.port),
            "TINKERCLOUD_METRICS_PORT": str(self.metrics_port),
            "TINKERCLOUD_BOOTSTRAP_KEY": API_KEY,
            "TINKERCLOUD_LOG_LEVEL": "debug",
        }
        if self.settings.get("TINKERCLOUD_PROVIDER") != "kubernetes":
            own["TINKERCLOUD_ORPHAN_GRACE_SECONDS"] = str(PATIENCE_SECONDS)
        return {**inherited, **own, **self.settings}

    def command(self, *arguments: str) -> str:
        """Run the `tinkercloud` command in its environment and return the output."""
        if self.warm_python is not None:
            result = warm_processes.run(self.warm_python, PROGRAM, arguments, self.environment())
        else:
            result = subprocess.run(
                [sys.executable, "-m", PROGRAM, *arguments],
                env=self.environment(),
                capture_output=True,
                text=True,
                check=False,
            )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def is_healthy(self) -> bool:
        """Whether its health check succeeds."""
        try:
            return self.request("GET", "/healthz", key=None).status == 200
        except OSError:
            return False

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all series with these labels; 0 without any."""
        return _metric(f"http://127.0.0.1:{self.metrics_port}/metrics", name, labels)

    def head_metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric of the heads over all series with these labels."""
        records = (self.state_dir / "heads").glob("*/head.json")
        urls = [json.loads(record.read_text())["url"] for record in records]
        return sum(_metric(url + HEAD_METRICS, name, labels) for url in urls)

    def stop(self) -> None:
        """Stop it like a service manager and wait until it has exited."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(PATIENCE_SECONDS)

    def kill(self) -> None:
        """Kill it without warning; its heads keep running."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def head_pids(self) -> list[int]:
        """Return the process ids of the running heads."""
        pids = []
        for record in (self.state_dir / "heads").glob("*/head.json"):
            # A head that has just ended has none any more.
            with contextlib.suppress(FileNotFoundError):
                pids.append(int(json.loads(record.read_text())["pid"]))
        return pids

    def kill_heads(self) -> None:
        """Kill all heads without warning."""
        for pid in self.head_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def client(self, key: str = API_KEY) -> tinker.ServiceClient:
        """Return an SDK client of this server."""
        return self.clients.make(self.url, key)

    def rest(self, key: str = API_KEY) -> tinker.RestClient:
        """Return an SDK client of the REST calls."""
        return tinker.RestClient(base_url=self.url, api_key=key)

    def new_key(self, owner: str) -> str:
        """Return a new key of an owner."""
        path = f"/api/v1/users/{urllib.parse.quote(owner, safe='')}/keys"
        made = self.request("POST", path, {"name": owner})
        assert made.status == HTTPStatus.OK, made.body
        return str(made.json()["key"])

    def environment_of_recipes(self, folder: Path) -> dict[str, str]:
        """Return an environment for programs whose only hub is the mirror of this server.

        Args:
            folder: where the hub's client keeps its cache.
        """
        return {
            **os.environ,
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": API_KEY,
            "HF_ENDPOINT": f"{self.url}/hf",
            "HF_HOME": str(folder / "hf"),
            "WANDB_MODE": "disabled",
        }

    def new_project(self, name: str, key: str = API_KEY) -> str:
        """Create a project of the key's owner.

        Returns:
            Its id: the name and random letters, because tests share servers and ids are unique.
        """
        project_id = f"{name}-{secrets.token_hex(4)}"
        created = self.post("projects", {"name": name, "project_id": project_id}, key=key)
        assert created.status == 200, created.body
        return project_id

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        key: str | None = API_KEY,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a plain HTTP request; bytes are sent unchanged, other bodies as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        fields = {"Content-Type": "application/json", **(headers or {})}
        if key is not None:
            fields["X-API-Key"] = key
        request = urllib.request.Request(self.url + path, data=data, headers=fields, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
                return Answer(response.status, dict(response.headers), response.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, dict(error.headers), error.read())

    def post(self, path: str, body: object, *, key: str | None = API_KEY) -> Answer:
        """POST to an API path."""
        return self.request("POST", f"/api/v1/{path}", body, key=key)

    def result(
        self,
        request_id: str,
        *,
        key: str | None = API_KEY,
        accept: str = "application/x-protobuf, application/json",
    ) -> Answer:
        """Wait for a future like the SDK."""
        while True:
            answer = self.request(
                "POST",
                "/api/v1/retrieve_future",
                {"request_id": request_id},
                key=key,
                headers={"Accept": accept},
            )
            if answer.status != 408:
                return answer


def _metric(url: str, name: str, labels: dict[str, str]) -> float:
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = [each for family in families for each in family.samples if each.name == name]
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


@contextlib.contextmanager
def a_server(
    state_dir: Path, models: Mapping[str, Path], settings: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run a server; stop it and its heads afterwards in any case."""
    server = Server(models, state_dir, settings or {})
    try:
        server.start()
        yield server
    finally:
        server.clients.close()
        server.stop()
        server.kill_heads()


@contextlib.contextmanager
def warm_servers(folder: Path) -> Iterator[None]:
    """Start the servers of a block, their commands and their heads in forks of a warm Python.

    Args:
        folder: The folder of its log and its socket.
    """
    with warm_python(folder, warm_processes.MODULES, warm_processes.SETTINGS) as path:
        Server.warm_python = path
        try:
            yield
        finally:
            Server.warm_python = None
