"""Session heads as child processes of this server: one for each base model, shared by all runs.

A head outlives a server that is killed (its lease says for how long), so that the next server
finds it by the file it left, `heads/<name>/head.json`, and the runs in it go on. A server that is
stopped properly stops its heads too, which suspend their runs; they go on in the next server's.

A head holds the lock on `heads/<name>/head.lock` for as long as its process lives (it inherits the
open file), so that it is known to have ended, also by a server that did not start it. Until then it
may be writing what it suspends, and no other head may take its place.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO

import aiohttp
import structlog

from tinkercloud_api.head_client import open_session
from tinkercloud_api.providers.base import (
    HeadEndpoint,
    HeadFailed,
    Pending,
    Placement,
    ServedModel,
)
from tinkercloud_api.settings import Settings
from tinkercloud_protocol import routes
from tinkercloud_protocol.errors import InvalidRequest, NotFound
from tinkercloud_protocol.launch import BaseModelSource, HeadConfig, HeadStatus, Listen, ModelSpec

log = structlog.get_logger(__name__)

_ADOPT_SECONDS = 5.0
_LEASE_RETRY_SECONDS = 0.2
_STOP_MARGIN_SECONDS = 10.0
"""Between the end of what a stopping head may do and its end."""
_LOG_TAIL_BYTES = 4096
_BACKOFF_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 60.0
"""After a start that failed, until the next one; twice as long after each."""


@dataclass(frozen=True, slots=True)
class _Record:
    """What a server leaves for the next one about a running head."""

    pid: int
    url: str
    generation: str


class _Killed(HeadFailed):
    """A head was killed while it started."""


class _Backoff:
    """When a head whose starts fail may be started again."""

    def __init__(self) -> None:
        self._failures = 0
        self._not_before = 0.0
        self._reason = ""

    def check(self) -> None:
        """Check that a start may begin now.

        Raises:
            HeadFailed: the last one failed a moment ago; the message says why and when the next is.
        """
        left = self._not_before - time.monotonic()
        if left > 0:
            raise HeadFailed(f"{self._reason}; the next start is tried in {left:.0f} s")

    def record(self, error: BaseException | None) -> None:
        """Take note of how a start ended."""
        self._failures = self._failures + 1 if error is not None else 0
        self._reason = str(error)
        pause = min(_BACKOFF_SECONDS * 2.0 ** (self._failures - 1), _MAX_BACKOFF_SECONDS)
        self._not_before = time.monotonic() + pause if error is not None else 0.0


class _LocalHead:
    """One base model's head: absent, starting or running."""

    def __init__(
        self, model: ServedModel, settings: Settings, client: aiohttp.ClientSession
    ) -> None:
        self._model = model
        self._settings = settings
        self._client = client
        self._folder = settings.state_dir.absolute() / "heads" / _slug(model.name)
        self._reason = self._folder / "reason"
        self._starting: asyncio.Task[HeadEndpoint] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._lease: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._backoff = _Backoff()
        self.unsaved = self._folder / "unsaved"
        """Where a stopping head writes what the checkpoint store does not take."""
        self.endpoint: HeadEndpoint | None = None
        self.newly_ended: list[str] = []
        """Generations whose end was noticed since somebody looked."""

    async def acquire(self) -> HeadEndpoint:
        """Return the running head; start it if there is none. Callers share one start.

        Raises:
            HeadFailed: it could not be started, now or a moment ago: starts that fail are repeated
                ever more rarely.
        """
        if self.endpoint is None:
            self.begin_start()
        if self._starting is not None:
            return await asyncio.shield(self._starting)
        assert self.endpoint is not None  # noqa: S101 - neither absent nor starting
        return self.endpoint

    def begin_start(self) -> None:
        """Begin to start the head, if it neither runs nor is being started."""
        if self.endpoint is None and self._starting is None:
            self._backoff.check()
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(self._start_is_over)

    def _start_is_over(self, task: "asyncio.Task[HeadEndpoint]") -> None:
        self._starting = None
        if task.cancelled():
            return
        error = task.exception()
        self._backoff.record(error)
        if error is not None:
            log.error(
                "a session head could not be started", model=self._model.name, error=str(error)
            )

    async def _start(self) -> HeadEndpoint:
        """Start the head, once more if it is killed meanwhile: for memory, say, or by an admin."""
        try:
            return await self._start_once()
        except _Killed as error:
            log.warning("a session head is started once more", reason=error.message)
            return await self._start_once()

    async def _start_once(self) -> HeadEndpoint:
        self._folder.mkdir(parents=True, exist_ok=True)
        token, generation = secrets.token_urlsafe(32), secrets.token_hex(8)
        self._write_secret("token", token)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(2048)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            config = self._config(generation, listener.fileno())
            (self._folder / "config.json").write_text(config.model_dump_json(indent=2))
            self._process = await self._spawn(listener.fileno())
        endpoint = HeadEndpoint(url, token, generation)
        log.info("session head started", model=self._model.name, pid=self._process.pid)
        await self._wait_until_ready(endpoint, self._process)
        self._adopted(endpoint)
        record = _Record(self._process.pid, url, generation)
        self._write_secret("head.json", json.dumps(asdict(record)))
        return endpoint

    async def _spawn(self, listening_fd: int) -> asyncio.subprocess.Process:
        self._keep_log()
        with self._lock_file() as lock, (self._folder / "head.log").open("wb") as output:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._reason.unlink(missing_ok=True)
            # Of heads that were killed: the lock says that none of them lives.
            await asyncio.to_thread(shutil.rmtree, self._folder / "scratch", ignore_errors=True)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tinkercloud_worker", str(self._folder / "config.json")),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(listening_fd, lock.fileno()),
                start_new_session=True,
                env=_head_environment(),
            )
            lock.truncate(0)
            lock.write(str(process.pid))
            return process

    def _keep_log(self) -> None:
        """Keep the log of the last head that was ready, whose last words say why it ended.

        Starts that failed since then do not replace it: the server's own log says why.
        """
        with contextlib.suppress(FileNotFoundError):
            (self._folder / "head.json").unlink()
            (self._folder / "head.log").replace(self._folder / "head.log.1")

    def _lock_file(self) -> IO[str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        return (self._folder / "head.lock").open("a+")

    def _config(self, generation: str, fd: int) -> HeadConfig:
        settings = self._settings
        timings = settings.timings.model_copy(
            update={"orphan_grace_seconds": settings.orphan_grace_seconds}
        )
        return HeadConfig(
            head=_slug(self._model.name),
            generation=generation,
            model=BaseModelSource(name=self._model.name, path=self._model.local_path or ""),
            token_file=str(self._folder / "token"),
            checkpoint_root=settings.checkpoint_url,
            scratch_dir=str(self._folder / "scratch" / generation),
            unsaved_dir=str(self.unsaved),
            reason_file=str(self._reason),
            listen=Listen(fd=fd),
            trainer=settings.trainer,
            sampler=settings.sampler,
            limits=settings.limits,
            timings=timings,
        )

    async def _wait_until_ready(
        self, endpoint: HeadEndpoint, process: asyncio.subprocess.Process
    ) -> None:
        ready = asyncio.create_task(self._get(endpoint, routes.HEAD_WAIT_READY))
        ended = asyncio.create_task(process.wait())
        seconds = self._settings.head_deadline_seconds
        try:
            done, _ = await asyncio.wait(
                {ready, ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            # Also when the start is given up: a task that nobody awaits has its error logged.
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)
        if ready in done and ready.exception() is None:
            return
        if process.returncode is None:
            process.kill()
            await process.wait()
        what = "ended" if done else f"was not ready within {seconds:.0f} s"
        message = (
            f"the session head of {self._model.name!r} {what} while starting: {self._last_words()}"
        )
        # A negative code is a signal that this server did not send.
        raise (_Killed if done and (process.returncode or 0) < 0 else HeadFailed)(message)

    def _last_words(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self._reason.read_text().strip()
        tail = (self._folder / "head.log").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        lines = [line for line in tail.splitlines() if line.strip()]
        errors = [line for line in lines if '"level": "error"' in line or "Error" in line]
        return (errors or lines or ["no output"])[-1][:500]

    async def adopt(self) -> None:
        """Take over the head a previous server left running, or see it to its end."""
        if not await self._adopt():
            await self.stop()

    async def _adopt(self) -> bool:
        try:
            record = _Record(**json.loads((self._folder / "head.json").read_text()))
            token = (self._folder / "token").read_text()
        except (FileNotFoundError, ValueError, TypeError):
            return False
        endpoint = HeadEndpoint(record.url, token, record.generation)
        try:
            async with asyncio.timeout(_ADOPT_SECONDS):
                status = HeadStatus.model_validate_json(
                    await self._get(endpoint, routes.HEAD_STATUS)
                )
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return False
        if status.generation != record.generation:
            return False
        log.info("session head found running", model=self._model.name, pid=record.pid)
        self._adopted(endpoint)
        return True

    def _adopted(self, endpoint: HeadEndpoint) -> None:
        log.info("the model is ready", model=self._model.name)
        self.endpoint = endpoint
        self._lease = asyncio.create_task(self._hold_lease(endpoint))

    async def _hold_lease(self, endpoint: HeadEndpoint) -> None:
        """Hold the head's lease; when it can't be held any more, the head is ending."""
        while True:
            try:
                await self._get(endpoint, routes.HEAD_LEASE)
                await asyncio.sleep(_LEASE_RETRY_SECONDS)
            except aiohttp.ClientConnectorError:
                break
            except aiohttp.ClientError:
                continue
        await self._ended()
        if self._is_stopping:
            log.info("session head has stopped", model=self._model.name)
        else:
            log.error(
                "session head is gone", model=self._model.name, generation=endpoint.generation
            )
        self.endpoint = None
        self.newly_ended.append(endpoint.generation)

    async def _ended(self) -> None:
        """Wait until no process of the head is left."""
        with self._lock_file() as lock:
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)

    def _running_pid(self) -> int | None:
        """Return the head's process, whoever started it; None if there is none."""
        with self._lock_file() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                return int(lock.read() or 0) or None
        return None

    async def _get(self, endpoint: HeadEndpoint, path: str) -> bytes:
        async with self._client.get(
            endpoint.url + path,
            headers={routes.HEAD_TOKEN_HEADER: endpoint.token},
            timeout=aiohttp.ClientTimeout(total=None),
        ) as response:
            if response.status != HTTPStatus.OK:
                # Not aiohttp's error, which shows the request's headers, and so the token.
                raise aiohttp.ClientError(f"{path} was answered with status {response.status}")
            return await response.read()

    async def stop(self) -> None:
        """Stop the head and wait for its end."""
        self._is_stopping = True
        try:
            await self._stop()
        finally:
            self._is_stopping = False

    async def _stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        pid = self._running_pid()
        if pid is None or not _signal(pid, signal.SIGTERM):
            return
        ended = asyncio.create_task(self._ended())
        seconds = self._settings.timings.stop_seconds + _STOP_MARGIN_SECONDS
        done, _ = await asyncio.wait({ended}, timeout=seconds)
        if not done:
            log.error("a session head does not end and is killed", model=self._model.name, pid=pid)
            _signal(pid, signal.SIGKILL)
            await ended
        if self._lease is not None:
            await self._lease
        if self._process is not None:
            await self._process.wait()

    def _write_secret(self, name: str, content: str) -> None:
        """Write a file only this user can read, whole or not at all."""
        temporary = self._folder / f".{name}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        temporary.replace(self._folder / name)


class LocalProvider:
    """See `providers.base.SessionProvider`, whose contract this class fulfils."""

    def __init__(self, models: list[ServedModel], settings: Settings) -> None:
        self._models = {model.name: model for model in models}
        self._settings = settings
        self._client: aiohttp.ClientSession | None = None
        self._heads: dict[str, _LocalHead] = {}

    async def start(self) -> None:
        """See `SessionProvider.start`."""
        self._client = open_session()
        for model in self._models.values():
            head = _LocalHead(model, self._settings, self._client)
            self._heads[model.name] = head
            await head.adopt()
            if self._settings.preload:
                head.begin_start()

    async def stop(self) -> None:
        """See `SessionProvider.stop`."""
        await asyncio.gather(*[head.stop() for head in self._heads.values()])
        if self._client is not None:
            await self._client.close()

    def models(self) -> list[ServedModel]:
        """See `SessionProvider.models`."""
        return list(self._models.values())

    async def admit(self, placement: Placement) -> ModelSpec:
        """See `SessionProvider.admit`. There are no pods here to choose anything about."""
        assert placement.model is not None  # noqa: S101 - only runs are admitted
        if chosen := placement.options.named():
            raise InvalidRequest(
                f"{', '.join(chosen)}: this server runs without Kubernetes; leave it out of tags"
                " and user_metadata"
            )
        return placement.model

    def find(self, placement: Placement) -> HeadEndpoint | None:
        """See `SessionProvider.find`."""
        head = self._heads.get(placement.base_model)
        return head.endpoint if head is not None else None

    async def acquire(self, placement: Placement) -> HeadEndpoint:
        """See `SessionProvider.acquire`."""
        head = self._heads.get(placement.base_model)
        if head is None:
            raise NotFound(
                f"base model {placement.base_model!r} is not served here; the served ones are"
                f" {', '.join(map(repr, self._models))}"
            )
        return await head.acquire()

    def waiting(self, placement: Placement) -> Pending:
        """See `SessionProvider.waiting`."""
        reason = f"the session head of {placement.base_model!r} is loading the model"
        return Pending("paused_capacity", reason)

    def shared_heads(self) -> list[HeadEndpoint]:
        """See `SessionProvider.shared_heads`: all of them are."""
        return [head.endpoint for head in self._heads.values() if head.endpoint is not None]

    def runs(self) -> list[str]:
        """See `SessionProvider.runs`: heads are shared by all runs of a base model."""
        return []

    async def is_gone(self, placement: Placement) -> bool:  # noqa: ARG002 - part of the interface
        """See `SessionProvider.is_gone`: a head can always be started again."""
        return False

    def has_ended(self, placement: Placement, generation: str) -> bool:
        """See `SessionProvider.has_ended`."""
        endpoint = self.find(placement)
        # An endpoint is there until the head's last process has ended.
        return endpoint is None or endpoint.generation != generation

    def unsaved(self, placement: Placement) -> Path | None:
        """See `SessionProvider.unsaved`."""
        head = self._heads.get(placement.base_model)
        return head.unsaved if head is not None else None

    def newly_ended(self) -> list[str]:
        """See `SessionProvider.newly_ended`."""
        ended = [generation for head in self._heads.values() for generation in head.newly_ended]
        for head in self._heads.values():
            head.newly_ended.clear()
        return ended

    def invalidate(self, endpoint: HeadEndpoint) -> None:
        """See `SessionProvider.invalidate`: the lease tells when a head is gone."""

    async def release(self, placement: Placement) -> None:
        """See `SessionProvider.release`: nothing belongs to one run alone."""


def _slug(name: str) -> str:
    """Return a folder name that is readable, and different for different model names."""
    readable = re.sub(r"[^0-9A-Za-z.-]+", "-", name).strip("-.")[:48]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _head_environment() -> Mapping[str, str]:
    # OpenMP's threads must sleep when they have nothing to do: spinning ones starve the server
    # and each other on a small machine.
    defaults = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    own = {name for name in os.environ if name.startswith("TINKERCLOUD_")}
    return defaults | {name: value for name, value in os.environ.items() if name not in own}


def _signal(pid: int, number: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
