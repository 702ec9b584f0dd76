"""One inference server, and the adapters of this head that it has loaded.

Adapters are loaded when first needed, once for all waiting requests, while other requests continue.
A server loses its adapters when it restarts; this is detected when a request needs one, which is
then reloaded at most once per request.

Requests have no time limit, so a timeout can't distinguish a slow request from one that never
completes.
While requests run, the server's health is checked periodically. If it stays unhealthy, or is lost
otherwise, its requests are aborted, and the callers can retry.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import structlog

from tinkercloud_protocol.wire.errors import WireError
from tinkercloud_worker import metrics
from tinkercloud_worker.engine.sampling.sampler_interface import (
    PromptLogprobParams,
    SamplingRequest,
    StopRules,
)
from tinkercloud_worker.inference.client import NotThere, ServerError, ServerUnreachable
from tinkercloud_worker.inference.dialect import Dialect
from tinkercloud_worker.inference.weights_folder import WeightsFolder

log = structlog.get_logger(__name__)

T = TypeVar("T")
_RECOVERY_SECONDS = 1.0
"""Interval of health checks of a lost server."""
_SILENT_SECONDS = 60.0
"""Time without any response after which a server's health is checked; also the interval of
checks."""
_HUNG_SECONDS = 300.0
"""How long a server with requests may be unhealthy: the limit of SGLang's watchdog for a batch."""
_UNWELL_SECONDS = 60.0
"""How long a lost server may be unhealthy before all its requests are aborted. SGLang reports
unhealthy while it only loads weights, or prefills a long prompt."""
_PROBED_TOKENS = 16
_TOLERANCE = 0.25
"""Maximum mean difference of logprobs, more than rounding causes and less than another
temperature."""


class InferenceServer:
    """One server. Belongs to one event loop."""

    def __init__(self, dialect: Dialect, folder: WeightsFolder) -> None:
        self.dialect = dialect
        self.url = dialect.client.url
        self.running = 0
        """Requests that it has, or that wait for its mode; maintained by the caller."""
        self._folder = folder
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._verification: asyncio.Task[None] | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._at_work = 0
        self._last_success = 0.0
        """When a request last succeeded, in event loop time."""
        self._register_metrics()

    def _register_metrics(self) -> None:
        """Export the state as metrics, with counters initialized to 0."""
        requests = metrics.ENGINE_REQUESTS
        requests.labels(self.url, "running").set_function(lambda: self._at_work)
        requests.labels(self.url, "waiting").set_function(lambda: self.running - self._at_work)
        metrics.ENGINE_UP.labels(self.url).set_function(lambda: self.is_up)
        metrics.ENGINE_ADAPTERS.labels(self.url).set_function(lambda: len(self._loads))
        metrics.ENGINE_LOSSES.labels(self.url)
        metrics.ENGINE_LOST_ADAPTERS.labels(self.url)
        metrics.ENGINE_UNLOADS.labels(self.url)

    @property
    def is_up(self) -> bool:
        """Whether it responded to the last call."""
        return self._recovery is None

    async def recovered(self) -> None:
        """Wait until it is up."""
        while self._recovery is not None:
            await asyncio.shield(self._recovery)

    async def run(self, adapter: str | None, work: Callable[[], Awaitable[T]]) -> T:
        """Load an adapter (None: use the base model), and run a request with it.

        Raises:
            ServerUnreachable: the server does not respond.
            ServerError: the server failed.
        """
        await self._verified()
        if adapter is None:
            return await self._do(work)
        await self._loaded(adapter)
        load = self._loads.get(adapter)
        try:
            return await self._do(work)
        except NotThere:
            if self._loads.get(adapter) is load:
                log.info(
                    "an inference server has lost an adapter; reloading it",
                    url=self.url,
                    adapter=adapter,
                )
                metrics.ENGINE_LOST_ADAPTERS.labels(self.url).inc()
            self._forget(adapter, load)
        await self._loaded(adapter)
        return await self._do(work)

    async def _do(self, work: Callable[[], Awaitable[T]]) -> T:
        self._at_work += 1
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        try:
            result = await work()
            self._last_success = _now()
            return result
        finally:
            self._at_work -= 1
            if self._at_work == 0:
                self._watching.cancel()
                self._watching = None

    async def _watch(self) -> None:
        """Detect, while it has requests, whether it hangs. A slow server is healthy."""
        healthy = _now()
        while True:
            await asyncio.sleep(_SILENT_SECONDS)
            if await self._is_healthy():
                healthy = _now()
            elif (silent := _now() - healthy) > _HUNG_SECONDS:
                reason = f"{self.url} has not responded for {silent:.0f} s"
                self.begin_recovery(ServerUnreachable(reason))

    async def _is_healthy(self) -> bool:
        if _now() - self._last_success < _SILENT_SECONDS:
            return True
        try:
            await self.dialect.check_health()
        except ServerUnreachable:
            return False
        except WireError:
            # An error is a response too.
            return True
        return True

    def begin_recovery(self, error: ServerUnreachable) -> None:
        """Mark the server as down until it recovers.

        Its other requests are aborted if it is not healthy within a minute.
        """
        if self._recovery is None:
            log.warning("an inference server is lost", url=self.url, reason=error.message)
            metrics.ENGINE_LOSSES.labels(self.url).inc()
            self._verification = None
            self._recovery = asyncio.create_task(self._recover())

    def wait_until_healthy(self) -> None:
        """Mark a server that is starting as down until it is healthy."""
        if self._recovery is None:
            self._verification = None
            self._recovery = asyncio.create_task(self._recover())

    def forget(self) -> None:
        """Forget the state of a server that ends; another process may take its place."""
        if self._recovery is not None:
            self._recovery.cancel()
            self._recovery = None
        self._verification = None
        self._loads.clear()

    @property
    def adapters(self) -> list[str]:
        """The adapters that are loaded or being loaded."""
        return list(self._loads)

    async def load(self, adapter: str) -> None:
        """Load an adapter, unless it is loaded.

        Raises:
            ServerUnreachable: the server does not respond.
            ServerError: the server failed.
        """
        await self._verified()
        await self._loaded(adapter)

    def has(self, adapter: str) -> bool:
        """Return whether an adapter is loaded or being loaded."""
        return adapter in self._loads

    async def unload(self, adapter: str) -> None:
        """Unload an adapter, which may not be loaded."""
        load = self._loads.pop(adapter, None)
        if load is None:
            return
        try:
            await asyncio.wait({load})
            await self.dialect.unload_adapter(adapter)
            metrics.ENGINE_UNLOADS.labels(self.url).inc()
        except WireError as error:
            log.warning(
                "failed to unload an adapter", url=self.url, adapter=adapter, reason=str(error)
            )

    async def unload_all(self) -> None:
        """Unload all adapters, unless the server is down."""
        if self.is_up:
            await asyncio.gather(*[self.unload(adapter) for adapter in list(self._loads)])

    async def close(self) -> None:
        """Close the connections."""
        if self._recovery is not None:
            self._recovery.cancel()
        await self.dialect.client.close()

    async def _loaded(self, adapter: str) -> None:
        load = self._loads.get(adapter)
        if load is None:
            load = asyncio.create_task(self.dialect.load_adapter(self._folder.find(adapter)))
            self._loads[adapter] = load
        try:
            # A request that is cancelled must not cancel the load for the others.
            await asyncio.shield(load)
        except Exception:
            self._forget(adapter, load)
            raise

    def _forget(self, adapter: str, load: asyncio.Task[None] | None) -> None:
        if self._loads.get(adapter) is load:
            del self._loads[adapter]

    async def _verified(self) -> None:
        verification = self._verification
        if verification is None:
            verification = self._verification = asyncio.create_task(self._do(self._verify))
        try:
            await asyncio.shield(verification)
        except Exception:
            if self._verification is verification:
                self._verification = None
            raise

    async def _verify(self) -> None:
        """Check, before using any response, that the server has the right model and logprobs.

        A server that returns logprobs at the sampling temperature would silently bias training.
        """
        await self.dialect.check_model()
        probe = _probe([1], PromptLogprobParams())
        [sequence] = (await self.dialect.sample(probe, None)).sequences
        scored = _probe([1, *sequence.tokens], PromptLogprobParams(logprobs_from=1))
        logprobs = (await self.dialect.score(scored, None)).logprobs
        assert logprobs is not None  # noqa: S101 - they were requested
        error = float(np.abs(np.asarray(sequence.logprobs) - logprobs[1:]).mean())
        if not error <= _TOLERANCE:
            raise ServerError(
                f"the inference server {self.url} returns logprobs that do not match the model"
                f" (off by {error:.2f} on average at temperature {probe.temperature}): start"
                " SGLang with SGLANG_RETURN_ORIGINAL_LOGPROB=1, vLLM with --logprobs-mode"
                " raw_logprobs"
            )
        log.info("verified an inference server", url=self.url, logprob_error=round(error, 6))

    async def _recover(self) -> None:
        lost = _now()
        while True:
            await asyncio.sleep(_RECOVERY_SECONDS)
            try:
                await self.dialect.check_health()
            except ServerError as error:
                # Connections to a dead machine or a hung process stay open.
                if _now() - lost > _UNWELL_SECONDS:
                    self.dialect.client.abort_calls(f"{self.url} is lost: {error.message}")
                continue
            log.info("an inference server has recovered", url=self.url)
            self._recovery = None
            return


def _now() -> float:
    """Return the event loop's time, in seconds."""
    return asyncio.get_running_loop().time()


def _probe(prompt: list[int], prompt_logprobs: PromptLogprobParams) -> SamplingRequest:
    return SamplingRequest(
        prompt=np.asarray(prompt, dtype=np.int32),
        num_samples=1,
        max_tokens=_PROBED_TOKENS,
        seed=1,
        temperature=2.0,
        top_k=0,
        top_p=1.0,
        stop=StopRules(frozenset(), ()),
        prompt_logprobs=prompt_logprobs,
    )
