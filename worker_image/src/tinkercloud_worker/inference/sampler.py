"""Samples from inference servers: SGLang engines, or vLLM.

Published weights are written to a folder that the servers read, and each server loads them when it
first needs them. Publishing the weights of one model does not block requests for others. Files and
adapters of a version are removed once it is retired and its last request has ended.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from tinkercloud_protocol.heads.launch import SamplerConfig
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.tensors import PromptScores
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, WireError
from tinkercloud_worker.engine.sampling.growing_text import Decode
from tinkercloud_worker.engine.sampling.sampler_interface import SamplingRequest, SamplingResult
from tinkercloud_worker.engine.sampling.stopping import cut_at_stop
from tinkercloud_worker.engine.trainer import Publication, WeightsCopy
from tinkercloud_worker.inference.client import (
    AdaptersDisabled,
    NotThere,
    ServerError,
    ServerUnreachable,
)
from tinkercloud_worker.inference.engine_scaler import LoadScaler
from tinkercloud_worker.inference.inference_server import InferenceServer
from tinkercloud_worker.inference.server_pool import ServerPool
from tinkercloud_worker.inference.sglang.control import BASE, TRAINING, SglangControl
from tinkercloud_worker.inference.weights_folder import WeightsFolder

log = structlog.get_logger(__name__)

T = TypeVar("T")
_CLOSE_SECONDS = 15.0
_ATTEMPTS = 3
"""Attempts per request. After this many lost servers, the request is assumed to be the cause."""


@dataclass(frozen=True, slots=True)
class _Version:
    """A published version."""

    lora: LoraConfig | None
    """None for full models, and for the base model."""
    name: str | None
    """Name of its files; None for the base model."""

    @property
    def adapter(self) -> str | None:
        """Name of the adapter; None if the version is not an adapter."""
        return self.name if self.lora is not None else None

    @property
    def mode(self) -> str:
        """Required mode of a server: BASE, or the name of a full model."""
        return BASE if self.name is None or self.lora is not None else self.name


_BASE_MODEL = _Version(None, None)


class InferenceSampler:
    """Implements `engine.sampler.Sampler`. Belongs to one event loop."""

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        controls: Mapping[str, SglangControl],
        folder: WeightsFolder,
        config: SamplerConfig,
        *,
        decode: Decode,
        neutral: WeightsCopy | None,
        unadapted: Mapping[str, str],
    ) -> None:
        """Create a sampler without calling the servers.

        Args:
            servers: equivalent servers of the base model.
            controls: controls of the servers whose weights and memory this head manages, by URL.
            folder: where to write weights.
            config: limits and timeouts.
            decode: decoder of its tokenizer.
            neutral: an adapter that changes nothing, through which the base model is sampled if
                servers mishandle requests without an adapter; None if they don't.
            unadapted: fields of `LoraConfig` that must be off because servers can't adapt these
                modules, with the reasons.
        """
        scaling = config.inference.scaling
        number = scaling.min_engines if scaling is not None else len(servers)
        self._pool = ServerPool(servers, number, self._load, self._unload)
        self._servers = self._pool.all
        self._samples = 0
        """Samples in progress, waiting ones included."""
        self.scaler = LoadScaler(self._pool, scaling, lambda: self._samples) if scaling else None
        """Says how many servers are needed; None if their number is fixed."""
        self._controls = controls
        self._folder = folder
        self._config = config
        self._decode = decode
        self._neutral = neutral
        self._unadapted = unadapted
        self._base: asyncio.Task[_Version] | None = None
        self._versions: dict[str, _Version] = {}
        self._users: Counter[str] = Counter()
        """Number of versions and requests that need the files of a name."""
        self._cleaning: set[asyncio.Task[None]] = set()

    async def publish(self, version: str, weights: Publication | None) -> None:
        """See `Sampler.publish`. Returns once one server has loaded the weights.

        Raises:
            InvalidRequest: the servers don't support such weights.
            ServerError: no server is available.
        """
        if version in self._versions:
            return
        if weights is None:
            self._versions[version] = _BASE_MODEL
            return
        lora = weights.lora if isinstance(weights, WeightsCopy) else None
        if lora is None and not self._controls:
            raise InvalidRequest(
                "this model's sampler is an external inference server, whose base weights can't be"
                " changed, so it only supports LoRA adapters: create the model with a LoRA rank, or"
                " save its weights with a name and sample from them elsewhere"
            )
        for field, why in self._unadapted.items():
            if lora is not None and getattr(lora, field):
                raise InvalidRequest(
                    f"lora_config.{field}: must be false: this model's sampler, SGLang, {why};"
                    f" create the model with {field}=False, or save its weights with a name and"
                    " sample from them elsewhere"
                )
        if isinstance(weights, WeightsCopy):
            name = await self._write(weights)
        else:
            name = self._folder.register_remote(weights)
        published = _Version(lora, name)
        self._users[name] += 1
        try:
            await self._run_on_any(version, published, _nothing)
        except BaseException:
            self._release(name)
            raise
        self._versions[version] = published

    def release_caches(self) -> None:
        """See `Sampler.release_caches`: the servers manage their own caches."""

    async def retire(self, version: str) -> None:
        """See `Sampler.retire`."""
        published = self._versions.pop(version, None)
        if published is not None and published.name is not None:
            self._release(published.name)

    async def export(self, version: str) -> WeightsCopy | None:
        """See `Sampler.export`."""
        published = self._known(version)
        if published.name is None:
            return None
        return await asyncio.to_thread(self._folder.read, published.name, published.lora)

    async def sample(self, version: str, request: SamplingRequest) -> SamplingResult:
        """See `Sampler.sample`.

        Raises:
            InvalidRequest: the servers don't support the request.
            ServerError: no server is available, or it failed.
        """
        published = self._known(version)
        if published.name is not None:
            self._users[published.name] += 1
        self._samples += request.num_samples
        try:
            used = published if published.name is not None else await self._base_version()
            result = await self._run_on_any(version, used, _sampling(request, used.adapter))
        finally:
            self._samples -= request.num_samples
            if published.name is not None:
                self._release(published.name)
        if not request.stop.strings:
            return result
        return await asyncio.to_thread(_cut, result, request, self._decode)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Reserve the GPUs of colocated servers for the trainer until the context ends.

        This waits for servers that are down, since they allocate memory when they restart.

        Raises:
            ServerError: a server does not recover in time, or does not release its memory.
        """
        async with AsyncExitStack() as stack:
            for url, control in self._controls.items():
                context = await self._enter_training(self._servers[url], control)
                stack.push_async_exit(context)
            yield

    async def _enter_training(
        self, server: InferenceServer, control: SglangControl
    ) -> AbstractAsyncContextManager[None]:
        """Return a context that has been entered; the caller exits it."""
        for attempt in range(1, _ATTEMPTS + 1):
            control.invalidate_if_idle()
            context = control.modes.use(TRAINING)
            try:
                await context.__aenter__()
            except ServerUnreachable as error:
                server.begin_recovery(error)
                control.invalidate()
                if attempt == _ATTEMPTS:
                    raise
                await self._recovered(server)
            else:
                return context
        raise AssertionError("the last attempt returns or raises")

    async def _recovered(self, server: InferenceServer) -> None:
        try:
            async with asyncio.timeout(self._config.inference.recovery_seconds):
                await server.recovered()
        except TimeoutError:
            raise ServerUnreachable(
                f"the inference server {server.url}, which shares GPUs with the trainer, does not"
                f" respond and did not recover within"
                f" {self._config.inference.recovery_seconds:.0f} s; send the step again"
            ) from None

    async def close(self) -> None:
        """See `Sampler.close`: servers and volumes that outlive this process drop its weights."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.gather(*self._cleaning, return_exceptions=True)
                await asyncio.gather(
                    *[server.unload_all() for server in self._servers.values()],
                    *[control.close() for control in self._controls.values()],
                )
        except TimeoutError:
            log.warning("unloading adapters timed out; they stay loaded in the servers")
        if self.scaler is not None:
            self.scaler.close()
        for server in self._servers.values():
            await server.close()
        await asyncio.to_thread(self._folder.remove_all)

    def _known(self, version: str) -> _Version:
        if version not in self._versions:
            raise NotFound(
                f"sampling session {version!r} is unknown here: it was deleted, or its weights"
                " existed only in a head that has stopped; save the weights again"
            )
        return self._versions[version]

    async def _base_version(self) -> _Version:
        """Return the version for the base model; write the neutral adapter on first use."""
        if self._neutral is None:
            return _BASE_MODEL
        if self._base is None:
            self._base = asyncio.create_task(self._publish_neutral(self._neutral))
        writing = self._base
        try:
            return await asyncio.shield(writing)
        except Exception:
            if self._base is writing:
                self._base = None
            raise

    async def _publish_neutral(self, neutral: WeightsCopy) -> _Version:
        name = await self._write(neutral)
        version = _Version(neutral.lora, name)
        try:
            await self._run_on_any("", version, _nothing)
        except AdaptersDisabled:
            # Without adapters, none can be applied to the base model by mistake.
            return _BASE_MODEL
        return version

    async def _run_on_any(
        self,
        version: str,
        published: _Version,
        work: Callable[[InferenceServer], Awaitable[T]],
    ) -> T:
        """Run a request on a server with a version's weights; retry on others if it is lost."""
        # All inflight versions of one model have the same routing key.
        key = version.partition("@")[0]
        for attempt in range(1, _ATTEMPTS + 1):
            # The time spent on a lost server does not count as waiting for others.
            server = await self._pool.choose(key, self._config.inference.recovery_seconds)
            server.running += 1
            try:
                return await self._on(server, published, work)
            except ServerUnreachable as error:
                server.begin_recovery(error)
                self._lost(server)
                if attempt == _ATTEMPTS:
                    raise
            except NotThere:
                # The server has reloaded the adapter by now, but not the weights below it.
                if server.url not in self._controls or attempt == _ATTEMPTS:
                    raise
                self._lost(server)
            finally:
                server.running -= 1
        raise AssertionError("the last attempt returns or raises")

    async def _on(
        self,
        server: InferenceServer,
        published: _Version,
        work: Callable[[InferenceServer], Awaitable[T]],
    ) -> T:
        control = self._controls.get(server.url)
        if control is None:
            return await server.run(published.adapter, lambda: work(server))
        async with control.modes.use(published.mode):
            return await server.run(published.adapter, lambda: work(server))

    async def _load(self, server: InferenceServer, adapter: str) -> None:
        """Load an adapter on a server that joins, unless it is no longer used."""
        if not self._users[adapter]:
            return
        control = self._controls.get(server.url)
        if control is None:
            await server.load(adapter)
            return
        control.invalidate_if_idle()
        async with control.modes.use(BASE):
            await server.load(adapter)

    def _lost(self, server: InferenceServer) -> None:
        if (control := self._controls.get(server.url)) is not None:
            control.invalidate()

    async def _write(self, weights: WeightsCopy) -> str:
        """Write weights and return their name; if cancelled, remove the files."""
        work = asyncio.to_thread(self._folder.write, weights)
        writing = asyncio.create_task(work)
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            self._clean_up(self._unwrite(writing))
            raise

    async def _unwrite(self, writing: asyncio.Task[str]) -> None:
        with suppress(WireError):
            await asyncio.to_thread(self._folder.remove, await writing)

    def _release(self, name: str) -> None:
        self._users[name] -= 1
        if self._users[name] == 0:
            del self._users[name]
            self._clean_up(self._clean(name))

    def _clean_up(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _clean(self, name: str) -> None:
        await asyncio.gather(*[self._unload(server, name) for server in self._servers.values()])
        await asyncio.to_thread(self._folder.remove, name)

    async def _unload(self, server: InferenceServer, name: str) -> None:
        control = self._controls.get(server.url)
        if control is None or not server.has(name):
            await server.unload(name)
            return
        try:
            # Adapters are in memory that the server releases while the trainer computes.
            async with control.modes.use(BASE):
                await server.unload(name)
        except ServerError as error:
            log.warning("failed to unload an adapter", url=server.url, reason=error.message)


def _sampling(
    request: SamplingRequest, adapter: str | None
) -> Callable[[InferenceServer], Awaitable[SamplingResult]]:
    """Return a function that samples, and concurrently scores the prompt if requested."""

    async def sample(server: InferenceServer) -> SamplingResult:
        prompt_logprobs = request.prompt_logprobs
        if prompt_logprobs.first_position is None and prompt_logprobs.targets is None:
            return await server.dialect.sample(request, adapter)
        sampling = asyncio.create_task(_sampled(server, request, adapter))
        scoring = asyncio.create_task(_scored(server, request, adapter))
        try:
            sampled, scores = await asyncio.gather(sampling, scoring)
            return SamplingResult(sampled.sequences, scores)
        finally:
            sampling.cancel()
            scoring.cancel()

    return sample


def _cut(result: SamplingResult, request: SamplingRequest, decode: Decode) -> SamplingResult:
    """Truncate the sequences where all samplers end them."""
    sequences = [cut_at_stop(sequence, request, decode) for sequence in result.sequences]
    return SamplingResult(sequences, result.prompt)


async def _sampled(
    server: InferenceServer, request: SamplingRequest, adapter: str | None
) -> SamplingResult:
    return await server.dialect.sample(request, adapter)


async def _scored(
    server: InferenceServer, request: SamplingRequest, adapter: str | None
) -> PromptScores:
    return await server.dialect.score(request, adapter)


async def _nothing(_: InferenceServer) -> None:
    """Send no request: the purpose of the call is to load the weights."""
