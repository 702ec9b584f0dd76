"""One session head as a child process of this server.

A head outlives a server that is killed, for as long as its lease allows. The next server finds it
through the file `heads/<name>/head.json`, and its runs continue. A server that is stopped normally
stops its heads as well. They suspend their runs, which the next server's heads resume.

A head holds a lock while its process lives (`head_folder`). Until it has ended, it may still be
writing suspended runs, and no other head may replace it.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path

import aiohttp
import structlog

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.backoff import Backoff
from tinkercloud_api.providers.base import (
    HeadEndpoint,
    HeadFailed,
    RecordReport,
    ServedModel,
)
from tinkercloud_api.providers.head_lease import hold_lease
from tinkercloud_api.providers.head_progress import describe, weight_bytes
from tinkercloud_api.providers.local.head_folder import HeadFolder, folder_of, lock_content
from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    HeadStatus,
    Listen,
    protocol_refusal,
)
from tinkercloud_protocol.wire import routes

log = structlog.get_logger(__name__)

_ADOPT_SECONDS = 5.0
_LEASE_RETRY_SECONDS = 0.2
_STOP_MARGIN_SECONDS = 10.0
"""Time for a head to exit after its own shutdown timeout, before it is killed."""
_PROGRESS_SECONDS = 5.0
"""How often a server logs how far a head is that loads or stops."""


@dataclass(frozen=True, slots=True)
class _Record:
    """Record of a running head in `head.json`, from which the next server takes it over."""

    pid: int
    url: str
    generation: str


class _Killed(HeadFailed):
    """A head was killed while it was starting."""


@contextlib.asynccontextmanager
async def _reporting(model: str, event: str, progress: Callable[[], str]) -> AsyncIterator[None]:
    """Log from time to time how far the head of a model is, within the context."""

    async def report() -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            log.info(event, model=model, progress=progress())

    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        reporting.cancel()


class LocalHead:
    """The head of one base model: stopped, starting or running."""

    def __init__(
        self,
        model: ServedModel,
        settings: Settings,
        client: aiohttp.ClientSession,
        record_report: RecordReport,
    ) -> None:
        self._model = model
        self._settings = settings
        self._client = client
        self._record_report = record_report
        self._folder = HeadFolder(folder_of(settings.state_dir, model.name))
        self._starting: asyncio.Task[HeadEndpoint] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._lease: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._is_removed = False
        self._backoff = Backoff()
        self._started_at = time.monotonic()
        self._is_awaited = False
        """Whether the last process has ended, and the next one has not started."""
        self._weight_bytes = weight_bytes(Path(model.local_path)) if model.local_path else 0
        self.unsaved = self._folder.path / "unsaved"
        """Folder for suspended runs that the head could not upload to the checkpoint store."""
        self.journals = self._folder.path / "journals"
        """Folder of the journals of its runs, from which the next head continues them."""
        self.endpoint: HeadEndpoint | None = None
        self.failure: str | None = None
        """Why the last start failed; None if it did not."""
        self.newly_ended: list[str] = []
        """Generations that have ended and were not yet returned by `LocalProvider.newly_ended`."""

    async def acquire(self) -> HeadEndpoint:
        """Return the running head; start it if needed. Concurrent callers share one start.

        Raises:
            HeadFailed: the head failed to start, now or recently: failed starts are retried with
                exponential backoff. Or it was removed.
        """
        if self.endpoint is None:
            self.begin_start()
        if self._starting is not None:
            starting = self._starting
            try:
                return await asyncio.shield(starting)
            except asyncio.CancelledError:
                if starting.cancelled() and self._is_removed:
                    raise self._removed() from None
                raise
        assert self.endpoint is not None  # noqa: S101 - neither stopped nor starting
        return self.endpoint

    def begin_start(self) -> None:
        """Start the head in the background, unless it is running or starting.

        Raises:
            HeadFailed: it has failed to start recently, or was removed.
        """
        if self.endpoint is None and self._starting is None:
            if self._is_removed:
                raise self._removed()
            self._backoff.check()
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(self._start_finished)

    def _start_finished(self, task: "asyncio.Task[HeadEndpoint]") -> None:
        self._starting = None
        if task.cancelled():
            return
        error = task.exception()
        self._backoff.record(error)
        self.failure = str(error) if error is not None else None
        if error is not None:
            log.error("session head failed to start", model=self._model.name, error=str(error))

    async def _start(self) -> HeadEndpoint:
        """Start the head; retry once if it is killed meanwhile, for example for lack of memory."""
        try:
            return await self._start_once()
        except _Killed as error:
            log.warning(
                "restarting a session head that was killed during its start", reason=error.message
            )
            return await self._start_once()

    async def _start_once(self) -> HeadEndpoint:
        self._started_at, self._is_awaited = time.monotonic(), True
        token, generation = secrets.token_urlsafe(32), secrets.token_hex(8)
        self._folder.write_secret("token", token)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(2048)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            config = self._config(generation, listener.fileno())
            (self._folder.path / "config.json").write_text(config.model_dump_json(indent=2))
            self._process = await self._spawn(listener.fileno())
            self._is_awaited = False
        endpoint = HeadEndpoint(url, token, generation)
        log.info(
            "session head started; loading the model", model=self._model.name, pid=self._process.pid
        )
        async with _reporting(self._model.name, "the model is loading", self.progress):
            await self._wait_until_ready(endpoint, self._process)
        await self._check_protocol(endpoint, self._process)
        self._adopted(endpoint)
        record = _Record(self._process.pid, url, generation)
        self._folder.write_secret("head.json", json.dumps(asdict(record)))
        return endpoint

    async def _spawn(self, listening_fd: int) -> asyncio.subprocess.Process:
        folder = self._folder
        folder.keep_log()
        with folder.locked() as lock, folder.log.open("ab") as output:
            # Writes append, so that a program which rotates logs can truncate it later, too.
            output.truncate(0)
            folder.reason.unlink(missing_ok=True)
            # Left behind by killed heads; the lock guarantees that none of them is running.
            await asyncio.to_thread(shutil.rmtree, folder.path / "scratch", ignore_errors=True)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tinkercloud_worker", str(folder.path / "config.json")),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(listening_fd, lock.fileno()),
                start_new_session=True,
                env=_head_environment(),
            )
            lock.truncate(0)
            lock.write(lock_content(process.pid))
            return process

    def _config(self, generation: str, fd: int) -> HeadConfig:
        settings = self._settings
        timings = settings.timings.model_copy(
            update={"orphan_grace_seconds": settings.orphan_grace_seconds}
        )
        return HeadConfig(
            head=self._folder.path.name,
            generation=generation,
            model=BaseModelSource(name=self._model.name, path=self._model.local_path or ""),
            token_file=str(self._folder.path / "token"),
            checkpoint_root=settings.checkpoint_url,
            scratch_dir=str(self._folder.path / "scratch" / generation),
            unsaved_dir=str(self.unsaved),
            reason_file=str(self._folder.reason),
            listen=Listen(fd=fd),
            trainer=settings.trainer,
            sampler=settings.sampler,
            limits=settings.limits,
            timings=timings,
            autosave=settings.autosave,
            journal_dir=str(self.journals),
            durability=settings.durability,
            otlp_endpoint=settings.otlp_endpoint,
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
            # Also on cancellation: asyncio logs the exceptions of tasks that nobody awaits.
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)
        if ready in done and ready.exception() is None:
            return
        if process.returncode is None:
            process.kill()
            await process.wait()
        failed = f"the session head of {self._model.name!r} failed to start"
        if not done:
            raise HeadFailed(
                f"{failed} because it was not ready within {seconds:.0f} s: it has loaded"
                f" {self.progress()}; if the machine is busy or the model large, raise"
                " TINKERCLOUD_HEAD_START_SECONDS"
            )
        reason, code = self._folder.stated_reason(), process.returncode or 0
        if reason is None and code != -signal.SIGKILL:
            # A killed head has no time to log why.
            reason = self._folder.logged_error()
        if reason is None and code < 0:
            number = signal.Signals(-code).name
            raise _Killed(
                f"{failed} because it was killed by {number}, as the system does if memory is short"
                f" ({self._folder.log})"
            )
        raise HeadFailed(f"{failed} because it exited: {reason or self._folder.last_line(code)}")

    async def _check_protocol(
        self, endpoint: HeadEndpoint, process: asyncio.subprocess.Process
    ) -> None:
        """Stop a new head whose installation was replaced by that of another release meanwhile."""
        status = HeadStatus.model_validate_json(await self._get(endpoint, routes.HEAD_STATUS))
        if why := protocol_refusal(status):
            process.kill()
            await process.wait()
            raise HeadFailed(
                f"{why}; restart the server, which was installed again since it started"
            )

    def state(self) -> str:
        """Describe the head: `ready`, `loading`, `failed` or `not loaded`, with why or how far."""
        if self.endpoint is not None:
            return "ready"
        if self._starting is not None:
            return f"loading {self.progress()}"
        if self.failure is not None:
            return f"failed: {self.failure}"
        return "not loaded: it is when a client needs it"

    def progress(self) -> str:
        """Describe how far the head is that loads."""
        seconds = time.monotonic() - self._started_at
        if self._is_awaited:
            return describe(seconds, None, self._weight_bytes, None)
        pid = self._process.pid if self._process is not None else None
        return describe(seconds, pid, self._weight_bytes, self._folder.progress())

    async def adopt(self) -> None:
        """Take over a head that a previous server left running, or stop it."""
        if not await self._adopt():
            await self.stop()

    async def _adopt(self) -> bool:
        try:
            record = _Record(**json.loads((self._folder.path / "head.json").read_text()))
            token = (self._folder.path / "token").read_text()
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
        if why := protocol_refusal(status):
            log.info("replacing a running session head", model=self._model.name, reason=why)
            return False
        log.info("took over a running session head", model=self._model.name, pid=record.pid)
        self._adopted(endpoint)
        return True

    def _adopted(self, endpoint: HeadEndpoint) -> None:
        log.info("the model is ready; serving it", model=self._model.name)
        self.endpoint = endpoint
        self._lease = asyncio.create_task(self._hold_lease(endpoint))

    async def _hold_lease(self, endpoint: HeadEndpoint) -> None:
        """Hold the head's lease. If the connection is refused, the head is terminating."""
        while True:
            try:
                # Its durability is asked from the head itself, which is on this machine.
                await hold_lease(self._client, endpoint, self._record_report, lambda _: None)
                await asyncio.sleep(_LEASE_RETRY_SECONDS)
            except aiohttp.ClientConnectorError:
                break
            except aiohttp.ClientError:
                continue
        await self._folder.wait_until_ended()
        if self._is_stopping:
            log.info("session head stopped", model=self._model.name)
        else:
            log.error(
                "session head ended unexpectedly",
                model=self._model.name,
                generation=endpoint.generation,
            )
        self.endpoint = None
        self._started_at, self._is_awaited = time.monotonic(), True
        self.newly_ended.append(endpoint.generation)

    async def _get(self, endpoint: HeadEndpoint, path: str) -> bytes:
        async with self._client.get(
            endpoint.url + path,
            headers={routes.HEAD_TOKEN_HEADER: endpoint.token},
            timeout=aiohttp.ClientTimeout(total=None),
        ) as response:
            if response.status != HTTPStatus.OK:
                # aiohttp's own error contains the request headers, which include the token.
                raise aiohttp.ClientError(f"{path} returned status {response.status}")
            return await response.read()

    async def stop(self) -> None:
        """Stop the head and wait until it has ended."""
        self._is_stopping = True
        try:
            await self._stop()
        finally:
            self._is_stopping = False

    async def remove(self) -> None:
        """Stop the head, and start it no more, also for those who wait for it."""
        self._is_removed = True
        try:
            await self.stop()
        except BaseException:
            self._is_removed = False
            raise

    def _removed(self) -> HeadFailed:
        return HeadFailed(f"base_model {self._model.name!r} is not served any more")

    async def _stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        pid = self._folder.running_pid()
        if pid is None or not _signal(pid, signal.SIGTERM):
            return
        ended = asyncio.create_task(self._folder.wait_until_ended())
        seconds = self._settings.timings.stop_seconds + _STOP_MARGIN_SECONDS
        log.info(
            "stopping a session head, which saves its runs",
            model=self._model.name,
            longest=f"{seconds:.0f} s",
        )
        async with _reporting(self._model.name, "the session head is stopping", self._saving):
            done, _ = await asyncio.wait({ended}, timeout=seconds)
        if not done:
            log.error(
                "killing a session head that does not stop in time", model=self._model.name, pid=pid
            )
            _signal(pid, signal.SIGKILL)
            await ended
        if self._lease is not None:
            # It may be waiting for the catalog.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lease, _STOP_MARGIN_SECONDS)
        if self._process is not None:
            await self._process.wait()

    def _saving(self) -> str:
        return self._folder.progress() or "nothing saved yet"


def _head_environment() -> Mapping[str, str]:
    defaults = {
        # Idle OpenMP threads must sleep: on a small machine, spinning threads starve the server and
        # each other.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        # oneDNN and torch's bridge to it each keep the kernels of 1,024 shapes by default, which
        # take half a gigabyte once texts of many lengths were computed.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        "LRU_CACHE_CAPACITY": "128",
    }
    own = {name for name in os.environ if name.startswith("TINKERCLOUD_")}
    return defaults | {name: value for name, value in os.environ.items() if name not in own}


def _signal(pid: int, number: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
