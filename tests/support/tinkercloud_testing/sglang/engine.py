"""A fake SGLang engine: SGLang's own server over the torch sampler, which computes real results.

It is also a program that takes SGLang's command line, key and probes, for an image.
"""

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_testing.sglang.generation import generated
from tinkercloud_testing.sglang.server import Ended, EngineRanks, SglangServer
from tinkercloud_testing.sglang.source import Json, Reply, flushing, read_tensors, routes
from tinkercloud_testing.training.engines import Engine, an_engine
from tinkercloud_worker.engine.trainer import WeightsCopy
from tinkercloud_worker.lora import adapters
from tinkercloud_worker.model.architecture import from_files


@dataclass
class FakeSglang:
    """One engine. `calls` are the called paths with their bodies."""

    engine: Engine
    model_path: Path
    gives_tempered_logprobs: bool = False
    tp_size: int = 1
    max_lora_rank: int = 64
    lora_target_modules: Sequence[str] | None = ("all",)
    """Target modules of adapters; None without `--enable-lora`."""
    lacks: frozenset[str] = frozenset()
    """Paths that this engine does not support."""
    refuses: frozenset[str] = frozenset()
    """Paths that it rejects with an error."""
    ends_over: frozenset[str] = frozenset()
    """Paths that make its process crash and restart."""
    calls: list[tuple[str, Json]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Calls that SGLang does not support, and wrong results of the simulated processes."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Loaded adapters: name to version in the torch sampler."""
    released: set[str] = field(default_factory=set)
    """Kinds of memory it has released."""
    unended: int = 0
    """Steps for which aborted requests still run."""
    runs_over: frozenset[str] = frozenset()
    """Paths whose next call finds a request running that has just started."""
    steps_over: int = 1
    """Steps for which that request runs."""
    is_updating: bool = False
    """Whether a weight update is open."""
    url: str = ""
    ranks: EngineRanks | None = None
    """Its processes in process groups, once one was created."""
    _weights: dict[str, torch.Tensor] | None = None
    """Its weights, if they were ever replaced."""
    _base: str = "base"
    _published: int = 0
    _held: dict[str, tuple[asyncio.Event, asyncio.Event]] = field(default_factory=dict)
    """Paths whose responses are delayed: events for an arrived call, and for the release."""

    def __post_init__(self) -> None:
        self._server = SglangServer(self, str(self.model_path))
        self._flushed: list[Any] = []
        self._flushing = flushing().SchedulerFlushWrapper(
            flush_cache=self._flush,
            is_fully_idle=lambda: self.unended == 0,
            send_output=lambda answer, _: self._flushed.append(answer),
        )

    async def mark(self, version: str) -> None:
        """Set the weight version, as an earlier head does."""
        await self._server.answer("POST", "/update_weight_version", {"new_version": version})

    def called(self, path: str) -> list[Json]:
        """Return the bodies of the calls of a path."""
        return [body for name, body in self.calls if name == path]

    def restart(self) -> None:
        """Reset the state to that of a new process."""
        self.adapters.clear()
        self.released.clear()
        if self.ranks is not None:
            self.ranks.kill()
            self.ranks = None
        self.is_updating, self._weights = False, None
        self._base = "base"
        self.unended = 0
        self._server = SglangServer(self, str(self.model_path))

    async def evict(self) -> None:
        """Unload all adapters, as if to make room for others."""
        for name in list(self.adapters):
            await self._server.unload(name)

    @asynccontextmanager
    async def holding(self, path: str) -> AsyncIterator[asyncio.Event]:
        """Delay responses of a path until the context ends; yield an event of the first call."""
        was_called, may_proceed = self._held[path] = asyncio.Event(), asyncio.Event()
        try:
            yield was_called
        finally:
            del self._held[path]
            may_proceed.set()

    async def generate(self, asked: Any, index: int) -> Json:
        """Sample, and score the prompt."""
        self._need_memory()
        name = asked.lora_path
        version = self._base if name is None else self.adapters[name[index]]
        return await generated(
            self.engine, version, asked, index, tempered=self.gives_tempered_logprobs
        )

    async def update_lora_adapter(self, asked: Any) -> Json:
        """Load an adapter from files or tensors, or unload one, by the kind of request."""
        self._need_memory()
        error = None
        match type(asked).__name__:
            case "UnloadLoRAAdapterReqInput":
                del self.adapters[asked.lora_name]
            case "LoadLoRAAdapterFromTensorsReqInput":
                error = await self._load(asked.lora_name, asked.config_dict, self._tensors(asked))
            case _ if not Path(asked.lora_path).is_dir():
                error = f"{asked.lora_path} does not exist"
            case _:
                folder = Path(asked.lora_path)
                config = json.loads((folder / "adapter_config.json").read_text())
                tensors = load_file(folder / "adapter_model.safetensors")
                error = await self._load(asked.lora_name, config, tensors)
        loaded = dict(self.adapters)
        return {"success": error is None, "error_message": error, "loaded_adapters": loaded}

    async def _load(
        self, name: str, config: Json, tensors: Mapping[str, torch.Tensor]
    ) -> str | None:
        """Load an adapter, and return the error if it is invalid."""
        if name in self.adapters:
            return f"Failed to load LoRA adapter {name} because it is already loaded"
        if config["r"] > self.max_lora_rank:
            return f"LoRA adapter {name} with rank {config['r']} is incompatible"
        weights = WeightsCopy(LoraConfig(rank=config["r"]), adapters.from_peft_names(tensors))
        self.adapters[name] = await self._publish(weights)
        return None

    def _tensors(self, asked: Any) -> dict[str, torch.Tensor]:
        """Read the tensors of a request: a copy for each rank, of which it reads its own."""
        assert asked.load_format == "flattened_bucket"
        copies = asked.serialized_named_tensors
        assert len(copies) == self.tp_size, f"{len(copies)} copies for {self.tp_size} ranks"
        [tensors, *others] = [read_tensors(copy) for copy in copies]
        for other in others:
            assert all(torch.equal(tensor, other[name]) for name, tensor in tensors.items())
        return tensors

    async def update_weights_from_disk(self, asked: Any) -> Json:
        """Read all weights from a folder."""
        self._need_memory()
        folder = Path(asked.model_path)
        if not (folder / "config.json").exists():
            return {"success": False, "message": f"{folder} does not exist"}
        await self._replace(load_file(folder / "model.safetensors"))
        return self._after_update(asked)

    async def begin_weight_update(self, _: object) -> Json:
        """Open a weight update."""
        if self.is_updating:
            return _done("a weight-update session is already open")
        self.is_updating = True
        return _done()

    async def update_weights_from_tensor(self, asked: Any) -> Json:
        """Load weights from a request."""
        if not self.is_updating:
            return _done("must run between begin_weight_update() and end_weight_update()")
        await self._replace(self._tensors(asked))
        return self._after_update(asked)

    async def init_weights_update_group(self, asked: Any) -> Json:
        """Join a process group."""
        if self.ranks is None:
            self.ranks = EngineRanks(self.tp_size)
        return _of_all(await self.ranks.call("init_weights_update_group", _fields(asked)))

    async def destroy_weights_update_group(self, asked: Any) -> Json:
        """Leave a process group."""
        if self.ranks is None:
            return _done("The group to be destroyed does not exist.")
        return _of_all(await self.ranks.call("destroy_weights_update_group", _fields(asked)))

    async def update_weights_from_distributed(self, asked: Any) -> Json:
        """Load weights from a process group."""
        if not self.is_updating:
            return _done("must run between begin_weight_update() and end_weight_update()")
        if self.ranks is None:
            return _done("Failed to receive weights: Group not in []")
        wanted = ("names", "dtypes", "shapes", "group_name", "load_format")
        arguments = {name: getattr(asked, name) for name in wanted}
        received = await self.ranks.call("receive_weights_from_distributed", arguments)
        for words in received:
            if isinstance(words, str):
                return _done(f"Failed to receive weights: {words}")
        [tensors, *others] = [dict(each) for each in received]
        for other in others:
            assert all(torch.equal(tensor, other[name]) for name, tensor in tensors.items())
        await self._replace(tensors)
        return self._after_update(asked)

    async def flush_cache(self, asked: Any) -> Json:
        """Flush the cache, immediately or once nothing runs."""
        answer = self._flushing.handle(asked)
        while answer is None:
            await asyncio.sleep(0.001)
            self.unended = max(self.unended - 1, 0)
            self._flushing.check_pending()
            answer = self._flushed.pop() if self._flushed else None
        return dict(answer.model_dump())

    def _flush(self, *, empty_cache: bool = True) -> bool:
        return self.unended == 0

    def _after_update(self, asked: Any) -> Json:
        """Return SGLang's response after replacing weights."""
        updater = SimpleNamespace(flush_cache=self._flush)
        flush = flushing().flush_cache_after_weight_update
        success, message = flush(updater, asked, True, "")
        return {"success": success, "message": message}

    def _need_memory(self) -> None:
        """Crash, as SGLang does on calls after releasing its memory."""
        if self.released:
            raise EOFError

    async def _replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the tensors with these names, except those that SGLang drops."""
        if self._weights is None:
            self._weights = load_file(self.model_path / "model.safetensors")
        for name, tensor in tensors.items():
            if self._drops(name, self._weights.keys() - tensors.keys()):
                continue
            assert tensor.shape == self._weights[name].shape
            self._weights[name] = tensor.clone()
        self._base = await self._publish(self._model(self._weights))

    def _drops(self, name: str, others: Set[str]) -> bool:
        """Return whether SGLang drops a weight because related ones did not arrive with it."""
        targets = set(self.lora_target_modules or ())
        are_adaptable = "all" in targets or {"up_proj", "down_proj"} <= targets
        if ".experts." in name:
            return are_adaptable
        queries, keys = "q_a_proj", "kv_a_proj_with_mqa"
        return not others.isdisjoint({name.replace(queries, keys), name.replace(keys, queries)})

    async def end_weight_update(self, _: object) -> Json:
        """Close the weight update."""
        if not self.is_updating:
            return _done("no weight-update session is open")
        self.is_updating = False
        return _done()

    async def update_weight_version(self, _: object) -> Json:
        """Accept the weight version, which the server records."""
        return {}

    async def get_internal_state(self, _: object) -> Json:
        """Return the state of its queues, which are empty."""
        return {"internal_state": {}}

    async def release_memory_occupation(self, asked: Any) -> Json:
        """Release memory."""
        self._need_memory()
        if self.unended:
            # SGLang asserts that it is idle.
            raise EOFError
        self.released |= set(asked.tags)
        return {}

    async def resume_memory_occupation(self, asked: Any) -> Json:
        """Resume memory."""
        if not set(asked.tags) <= self.released:
            raise EOFError
        self.released -= set(asked.tags)
        return {}

    def _model(self, tensors: Mapping[str, torch.Tensor]) -> WeightsCopy:
        """Return a model from tensors with the names of its files."""
        return WeightsCopy(None, from_files(str(self.model_path), tensors))

    async def _publish(self, weights: WeightsCopy) -> str:
        self._published += 1
        version = f"{self.url}/{self._published}"
        await self.engine.sampler.publish(version, weights)
        return version

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Respond to any request."""
        if request.path == "/health_generate" and (request.method, request.path) in routes():
            return web.Response(status=200 if self._server.draws else 503)
        body = await request.json() if request.can_read_body else None
        if body is not None:
            self.calls.append((request.path, body))
        if request.path in self.lacks:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.path in self.refuses:
            return web.json_response({"error": {"message": "refused"}}, status=500)
        if request.path in self.ends_over:
            return self._end(request)
        await self._before(request.path)
        try:
            reply = await self._server.answer(request.method, request.path, body, request.query)
        except Ended:
            # Its ranks have crashed, as SGLang's do on invalid handles or without memory.
            return self._end(request)
        except Exception as error:  # noqa: BLE001 - any exception is an error of the fake
            self.faults.append(f"{request.path}: {error!r}")
            reply = Reply({"error": {"message": str(error)}}, 400)
        if isinstance(reply.content, str):
            return web.Response(text=reply.content, status=reply.status_code)
        return web.json_response(reply.content, status=reply.status_code)

    async def _before(self, path: str) -> None:
        """Run what a test has configured to happen before a response."""
        if path in self._held:
            was_called, may_proceed = self._held[path]
            was_called.set()
            await may_proceed.wait()
        if path in self.runs_over:
            self.runs_over -= {path}
            self.unended = self.steps_over

    def _end(self, request: web.Request) -> web.Response:
        self.restart()
        if request.transport is not None:
            request.transport.abort()
        return web.Response()


@asynccontextmanager
async def a_fake_sglang(engine: Engine, model_path: Path) -> AsyncIterator[FakeSglang]:
    """Serve an engine until the context ends."""
    await engine.sampler.publish("base", None)
    fake = FakeSglang(engine, model_path)
    async with listening(fake):
        yield fake


@asynccontextmanager
async def listening(fake: FakeSglang, port: int = 0) -> AsyncIterator[None]:
    """Serve a fake until the context ends; port 0 selects a free one."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield
    finally:
        if fake.ranks is not None:
            fake.ranks.kill()
        await runner.cleanup()
    assert fake.faults == []


def _fields(asked: Any) -> Json:
    """Return the fields of a request without those that say where the result goes."""
    fields: Json = asked.model_dump(exclude={"rid", "http_worker_ipc"})
    return fields


def _of_all(answers: Sequence[Any]) -> Json:
    """Merge the results of all ranks: (success, message) of each."""
    words = [answer if isinstance(answer, str) else answer[1] for answer in answers]
    is_good = all(not isinstance(answer, str) and answer[0] for answer in answers)
    return _done(None if is_good else " | ".join(words))


def _done(error: str | None = None) -> Json:
    return {"success": error is None, "message": error or "Success"}


REFUSES = "FAKE_SGLANG_REFUSES"
"""Variable with the paths that are refused."""


async def serve(options: argparse.Namespace, fake: FakeSglang) -> None:
    """Serve until the process ends; print the path of each request."""

    async def handle(request: web.Request) -> web.StreamResponse:
        print(request.path, flush=True)
        if request.path == "/health":
            return web.Response()
        key = f"Bearer {options.api_key}"
        if not request.path.startswith("/health") and request.headers.get("Authorization") != key:
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await fake.handle(request)

    await fake.engine.sampler.publish("base", None)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    await asyncio.Event().wait()


def main() -> None:
    """Run as `python -m sglang.launch_server` does."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    wanted = ("--model-path", "--host", "--api-key", "--admin-api-key", "--dtype")
    others = ("--port", "--tp-size", "--context-length", "--max-lora-rank")
    for name in wanted:
        parser.add_argument(name, required=True)
    for name in others:
        parser.add_argument(name, required=True, type=int)
    parser.add_argument("--lora-target-modules", required=True, nargs="*")
    parser.add_argument("--moe-runner-backend", choices=("triton",))
    parser.add_argument("--attention-backend", choices=("triton",))
    parser.add_argument("--grammar-backend", choices=("llguidance",), required=True)
    parser.add_argument("--max-loras-per-batch", type=int, default=8)
    parser.add_argument("--lora-drain-wait-threshold", type=float, default=0.0)
    for name in ("--enable-lora", "--enable-deterministic-inference"):
        parser.add_argument(name, action="store_true", required=True)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model_path, dtype=options.dtype)
    tempered = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB") != "1"
    with an_engine(model, Path(tempfile.mkdtemp())) as engine:
        fake = FakeSglang(
            engine,
            Path(options.model_path),
            gives_tempered_logprobs=tempered,
            lora_target_modules=options.lora_target_modules,
            refuses=frozenset(os.environ.get(REFUSES, "").split()),
        )
        asyncio.run(serve(options, fake))
