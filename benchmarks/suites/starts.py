"""What starts cost, and what a server costs that has nothing to do: `python -m benchmarks starts`."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import orjson
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from benchmarks.shared.measuring import Measurement, cpu_seconds
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server

MODEL = "measured/model"
_ROUNDS = 5
_CONNECTIONS = 16
_SECONDS = 3.0
_RANK = 4


def measure(folder: str) -> Iterator[Measurement]:
    """Yield all measurements; heads serve the base model in `folder`."""
    yield _version()
    with tempfile.TemporaryDirectory() as scratch:
        yield from _starts(Path(scratch) / "state", Path(folder))
    with tempfile.TemporaryDirectory() as scratch:
        settings = {"TINKERCLOUD_PRELOAD": "false", "TINKERCLOUD_LOG_LEVEL": "info"}
        with a_server(Path(scratch) / "state", {MODEL: Path(folder)}, settings) as server:
            yield _idle_memory(server)
            yield from _rates(server)


def _version() -> Measurement:
    seconds = []
    for _ in range(_ROUNDS):
        before = _of_children()
        subprocess.run(
            [sys.executable, "-m", "tinkercloud_api", "--version"],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        seconds.append(_of_children() - before)
    what = "processor time of `tinkercloud --version`"
    return Measurement("C30", what, min(seconds), "s", "<= 0.3", "<= 0.1", f"best of {_ROUNDS}")


def _of_children() -> float:
    """Return the processor time in seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _starts(state_dir: Path, folder: Path) -> Iterator[Measurement]:
    began = time.perf_counter()
    with a_server(state_dir, {MODEL: folder}) as server:
        answers = time.perf_counter() - began
        pid = _ready_head(server)
        ready = time.perf_counter() - began
        assert server.process is not None
        own, of_head = cpu_seconds(server.process.pid), cpu_seconds(pid)
        yield Measurement("C31", "start until the API server answers", answers, "s", "<= 3", "<= 2")
        note = f"processor time: API server {own:.1f} s, head {of_head:.1f} s"
        what = "start until the model is loaded"
        yield Measurement("C32", what, ready, "s", "<= 12", "<= 8", note)

        os.kill(pid, signal.SIGKILL)
        began = time.perf_counter()
        server.client().create_lora_training_client(MODEL, rank=_RANK).result()
        again = time.perf_counter() - began
        note = f"processor time of the head {cpu_seconds(_ready_head(server)):.1f} s"
        what = "a killed head until a new run is on another one"
        yield Measurement("C33", what, again, "s", "<= 8", "<= 5", note)


def _ready_head(server: Server) -> int:
    """Wait until a head is ready; return its process id."""
    while True:
        for record in (server.state_dir / "heads").glob("*/head.json"):
            head = json.loads(record.read_text())
            try:
                with urllib.request.urlopen(head["url"] + routes.HEAD_READY, timeout=10):  # noqa: S310
                    return int(head["pid"])
            except (urllib.error.URLError, OSError):
                pass
        time.sleep(0.05)


def _idle_memory(server: Server) -> Measurement:
    assert server.process is not None
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    resident = int(status.partition("VmRSS:")[2].split()[0]) / 1000
    shared = int(status.partition("RssFile:")[2].split()[0]) / 1000
    note = f"{shared:.0f} MB of it are files, which processes share"
    return Measurement("C34", "idle API server, resident", resident, "MB", "<= 180", "<= 90", note)


def _rates(server: Server) -> Iterator[Measurement]:
    assert server.process is not None
    pid = server.process.pid
    training = server.client().create_lora_training_client(MODEL, rank=_RANK).result()
    body = orjson.dumps({"request_id": f"{training.model_id}:0"})
    key = f"X-API-Key: {API_KEY}\r\n"
    calls = (
        ("C35", "livez", _request("GET", "/livez", "", b""), ">= 1000"),
        (
            "C36",
            "healthz, which asks the catalog and the store",
            _request("GET", "/healthz", "", b""),
            ">= 100",
        ),
        ("C37", "retrieve_future", _request("POST", routes.RETRIEVE_FUTURE, key, body), ">= 500"),
    )
    for name, what, request, wanted in calls:
        before = cpu_seconds(pid)
        count = uvloop.run(_count(server.port, request))
        each = 1e6 * (cpu_seconds(pid) - before) / count
        note = f"{_CONNECTIONS} connections; processor time of the server {each:.0f} us"
        rate = count / _SECONDS
        yield Measurement(name, f"requests/s: {what}", rate, "/s", wanted, ">= 15000", note)


def _request(method: str, path: str, headers: str, body: bytes) -> bytes:
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nHost: t\r\n{headers}{length}\r\n".encode() + body


class _Connection(asyncio.Protocol):
    """Sends a request again and again. All responses have the length of the first one."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._length = self._received = 0
        self.num_answers = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._length:
            assert data.startswith(b"HTTP/1.1 200 "), data
            head, _, _ = data.lower().partition(b"\r\n\r\n")
            body = head.partition(b"content-length: ")[2].split(b"\r\n")[0]
            self._length = len(head) + 4 + int(body)
        self._received += len(data)
        if self._received == self._length:
            self._received = 0
            self.num_answers += 1
            self._transport.write(self._request)


async def _count(port: int, request: bytes) -> int:
    """Return the number of requests that are answered in `_SECONDS`."""
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(lambda: _Connection(request), "127.0.0.1", port)
        for _ in range(_CONNECTIONS)
    ]
    await asyncio.sleep(_SECONDS)
    for transport, _ in made:
        transport.close()
    return sum(connection.num_answers for _, connection in made)
