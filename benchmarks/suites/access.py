"""What reading the version of access rights costs: `python -m benchmarks access`.

Requests are passed to the application without HTTP, so that the ratios are upper bounds: a real
server does more work for each request, with and without the read.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import SecretStr
from uvicorn.lifespan.on import LifespanOn

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from benchmarks.shared.measuring import Measurement
from tinkercloud_api.access.auth import new_key
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import Application
from tinkercloud_protocol.wire.asgi import Message
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.storage.postgresql import a_postgresql

PATH = "/api/v1/client/dynamic_config"
"""A call that does nothing but authenticate its caller."""
ROUNDS, REQUESTS = 21, 160
WIDTHS = (1, 16)
"""How many requests are sent at once."""


class WithoutRead:
    """A version of access rights that costs nothing, in place of `AccessVersions`."""

    async def current(self) -> int:
        return 0


def measure(_folder: str) -> Iterator[Measurement]:
    with tempfile.TemporaryDirectory() as folder:
        yield from asyncio.run(_compared("SQLite", Path(folder) / "sqlite", None))
        with a_postgresql() as postgresql:
            url = postgresql.new_database()
            yield from asyncio.run(_compared("PostgreSQL", Path(folder) / "postgresql", url))


async def _compared(database: str, state: Path, url: str | None) -> list[Measurement]:
    key = new_key()
    settings = Settings(state_dir=state, database_url=url, bootstrap_key=SecretStr(key))
    measured = []
    async with started(Application(settings, OneHead())) as app:
        assert app.context is not None
        authenticator = app.context.authenticator
        reading = authenticator._versions
        for width in WIDTHS:
            seconds: dict[Any, list[float]] = {reading: [], WithoutRead(): []}
            for number in range(ROUNDS + 1):
                for versions, taken in seconds.items():
                    authenticator._versions = versions
                    # The first request of each turn looks the key up, as the version has changed.
                    await _call(app, key)
                    start = time.perf_counter()
                    loops = [_loop(app, key, REQUESTS // width) for _ in range(width)]
                    await asyncio.gather(*loops)
                    if number:
                        taken.append(time.perf_counter() - start)
            with_read, without = map(statistics.median, seconds.values())
            measured.append(
                Measurement(
                    f"A-{database}-{width}",
                    f"requests/s without the read of the version / with it, {width} at once",
                    with_read / without,
                    "x",
                    "<= 3",
                    "<= 1.5",
                    f"{database}; {1e6 * (with_read - without) / REQUESTS:.0f} us of"
                    f" {1e6 * with_read / REQUESTS:.0f} us a request",
                )
            )
    return measured


@asynccontextmanager
async def started(app: Application) -> AsyncIterator[Application]:
    lifespan = LifespanOn(uvicorn.Config(app, log_config=None))
    await lifespan.startup()
    yield app
    await lifespan.shutdown()


async def _loop(app: Application, key: str, requests: int) -> None:
    for _ in range(requests):
        await _call(app, key)


async def _call(app: Application, key: str) -> None:
    statuses = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "headers": [(b"x-api-key", key.encode()), (b"content-length", b"2")],
        "client": ("127.0.0.1", 1),
        "server": ("t", 80),
        "scheme": "http",
        "http_version": "1.1",
    }
    await app(scope, receive, send)
    assert statuses == [200]
