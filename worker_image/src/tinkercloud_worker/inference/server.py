"""One inference server, and the adapters of ours that it holds.

Adapters are loaded when first needed, each once however many requests wait for it, while others go
on. A server that restarts has forgotten them; that shows when it is asked for one, which is then
loaded again, at most once for a request.

Nothing bounds how long a request may take, so no timeout tells a slow one from one that will never
be answered. While any runs, the server's health is checked now and then. If it stays unhealthy, or
is lost otherwise, its requests are given up, and their callers may try again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import structlog

from tinkercloud_protocol.errors import WireError
from tinkercloud_worker import metrics
from tinkercloud_worker.engine.sampler import PromptLogprobParams, SamplingRequest, StopRules
from tinkercloud_worker.inference.client import NotThere, ServerError, ServerUnreachable
from tinkercloud_worker.inference.dialect import Dialect
from tinkercloud_worker.inference.weights_folder import WeightsFolder

log = structlog.get_logger(__name__)

T = TypeVar("T")
_RECOVERY_SECONDS = 1.0
"""Between two health checks of a server that does not answer."""
_SILENT_SECONDS = 60.0
"""Without any answer, after which a server's health is checked, and between two such checks."""
_HUNG_SECONDS = 300.0
"""How long a server with requests may be unhealthy: what SGLang's watchdog allows a batch."""
_UNWELL_SECONDS = 60.0
"""How long a lost server may be unhealthy before all its requests are given up. SGLang says that it
is while it does nothing but load weights, or read a long prompt."""
_PROBED_TOKENS = 16
_TOLERANCE = 0.25
"""Mean difference of logprobs that rounding can explain, and another temperature can't."""


class InferenceServer:
    """One server. Belongs to one event loop."""

    def __init__(self, dialect: Dialect, folder: WeightsFolder) -> None:
        self.dialect = dialect
        self.url = dialect.client.url
        self.running = 0
        """Requests that it has, or that wait for its mode; counted by who sends them."""
        self._folder = folder
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._verification: asyncio.Task[None] | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._at_work = 0
        self._last_success = 0.0
        """When a request last succeeded, in the event loop's time."""
        self._register_metrics()

    def _register_metrics(self) -> None:
        """Let its state be read as metrics; counters begin at 0 before anything has happened."""
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
        """Whether it has answered when it was last asked."""
        return self._recovery is None

    async def recovered(self) -> None:
        """Return once it is up."""
        while self._recovery is not None:
            await asyncio.shield(self._recovery)

    async def run(self, adapter: str | None, work: Callable[[], Awaitable[T]]) -> T:
        """Run a request with an adapter, which is loaded first (None: with the base model).

        Raises:
            ServerUnreachable: the server does not answer.
            ServerError: it fails.
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
                log.info("an inference server has lost an adapter", url=self.url, adapter=adapter)
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
        """Detect, while it has requests, that it hangs. A slow server is healthy."""
        healthy = _now()
        while True:
            await asyncio.sleep(_SILENT_SECONDS)
            if await self._is_healthy():
                healthy = _now()
            elif (silent := _now() - healthy) > _HUNG_SECONDS:
                reason = f"{self.url} has answered nothing for {silent:.0f} s"
                self.begin_recovery(ServerUnreachable(reason))

    async def _is_healthy(self) -> bool:
        if _now() - self._last_success < _SILENT_SECONDS:
            return True
        try:
            await self.dialect.check_health()
        except ServerUnreachable:
            return False
        except WireError:
            # An error is an answer too.
            return True
        return True

    def begin_recovery(self, error: ServerUnreachable) -> None:
        """Wait for the server to come back; until then it is not up.

        Its other requests are given up if it is not healthy within a minute.
        """
        if self._recovery is None:
            log.warning("an inference server is lost", url=self.url, reason=error.message)
            metrics.ENGINE_LOSSES.labels(self.url).inc()
            self._verification = None
            self._recovery = asyncio.create_task(self._recover())

    def has(self, adapter: str) -> bool:
        """Return whether an adapter has been loaded, or is being."""
        return adapter in self._loads

    async def unload(self, adapter: str) -> None:
        """Unload an adapter that is not needed any more. It may not be loaded."""
        load = self._loads.pop(adapter, None)
        if load is None:
            return
        try:
            await asyncio.wait({load})
            await self.dialect.unload_adapter(adapter)
            metrics.ENGINE_UNLOADS.labels(self.url).inc()
        except WireError as error:
            log.warning("an adapter stays loaded", url=self.url, adapter=adapter, reason=str(error))

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
        """Check, before any answer is used, that the server has the right model and logprobs.

        One that returns logprobs of the temperature it drew at would bias training silently.
        """
        await self.dialect.check_model()
        drawn = _probe([1], PromptLogprobParams())
        [sequence] = (await self.dialect.draw(drawn, None)).sequences
        scored = _probe([1, *sequence.tokens], PromptLogprobParams(logprobs_from=1))
        logprobs = (await self.dialect.score(scored, None)).logprobs
        assert logprobs is not None  # noqa: S101 - they were asked for
        error = float(np.abs(np.asarray(sequence.logprobs) - logprobs[1:]).mean())
        if not error <= _TOLERANCE:
            raise ServerError(
                f"the inference server {self.url} returns logprobs that are not the model's own"
                f" (off by {error:.2f} on average at temperature {drawn.temperature}): start"
                " SGLang with SGLANG_RETURN_ORIGINAL_LOGPROB=1, vLLM with --logprobs-mode"
                " raw_logprobs"
            )
        log.info("inference server", url=self.url, logprob_error=round(error, 6))

    async def _recover(self) -> None:
        lost = _now()
        while True:
            await asyncio.sleep(_RECOVERY_SECONDS)
            try:
                await self.dialect.check_health()
            except ServerError as error:
                # Connections to a machine that is gone, or to a process that hangs, stay open.
                if _now() - lost > _UNWELL_SECONDS:
                    self.dialect.client.give_up(f"{self.url} is lost: {error.message}")
                continue
            log.info("an inference server is back", url=self.url)
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
