"""A fake SGLang engine's processes: SGLang's own HTTP server, and ranks in process groups.

SGLang serves HTTP in one process, which calls others to compute. The first is SGLang's own code
here: its routes, and the manager behind them, are extracted from its source and run. So paths,
methods, requests and responses are exactly those of SGLang. The calls to the other processes go to
a simulation, whose results are checked against the classes that SGLang expects.

Each rank is a real process, which can be killed, or stopped as if it hung. As in SGLang, the ranks
of an engine have a default group of their own before they join any other.
"""

import asyncio
import multiprocessing
import os
import pickle
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch.distributed as dist
from pydantic import BaseModel

from tinkercloud_testing.sglang.source import (
    SGLANG,
    Json,
    Reply,
    asked_of_processes,
    definition,
    own_functions,
    parts,
    routes,
    server_fields,
)


class SimulatedProcesses(Protocol):
    """Simulates the processes that compute.

    It also has a method for each call of SGLang's manager, with the name in `_COMMUNICATOR_SPECS`.
    The method gets the request and returns the fields of the result; EOFError means that the
    process has ended.
    """

    tp_size: int
    lora_target_modules: Sequence[str] | None
    faults: list[str]
    """Errors of the simulation, which SGLang may turn into responses."""

    async def generate(self, asked: BaseModel, index: int) -> Json:
        """Return the fields of `BatchStrOutput` for one of a request's prompts."""

    async def update_weights_from_disk(self, asked: Any) -> Json:
        """Return the fields of `UpdateWeightFromDiskReqOutput`."""


class UnknownEndpoint(Exception):
    """SGLang does not serve this path, or not with this method."""


class Ended(BaseException):
    """A computing process has ended, and all others with it; this must not be handled."""


class SglangServer:
    """One server. Belongs to one event loop."""

    def __init__(self, processes: SimulatedProcesses, model_path: str) -> None:
        """Create a server that has just started.

        Args:
            processes: the simulated processes.
            model_path: the folder of its model.
        """
        self._processes = processes
        self._parts = parts()
        self._manager = manager = self._parts.TokenizerManager()
        self._config: Json = dict.fromkeys(server_fields()) | {"weight_version": "default"}
        for name, answer in asked_of_processes().items():
            setattr(manager, f"{name}_communicator", partial(self._ask, name, answer))
        vars(manager).update(
            abort_request=lambda **_: None,
            auto_create_handle_loop=lambda: None,
            config_value=self._config.__getitem__,
            crash_dump_folder="",
            dump_requests_folder="",
            elastic_worker_count=1,
            enable_lora=True,
            enable_metrics=False,
            generate_request=self._generate,
            incremental_streaming_output=False,
            is_generation=True,
            is_pause=False,
            is_pause_cond=asyncio.Condition(),
            lora_ref_cache={},
            lora_registry=self._parts.LoRARegistry(),
            lora_update_lock=asyncio.Lock(),
            mm_processor=None,
            model_config=SimpleNamespace(
                hf_config=None,
                is_audio_understandable_model=False,
                is_image_understandable_model=False,
            ),
            model_path=model_path,
            model_update_lock=self._parts.RWLock(),
            pending_lora_unloads={},
            record_config_updates=self._record,
            rid_to_state={},
            served_model_name=model_path,
            server_args=SimpleNamespace(resolved_dict=self._resolved, launch_command=[]),
            skip_tokenizer_init=False,
            startup_time=0.0,
            _async_dispatch_to_scheduler=self._dispatched,
            _lora_release_tasks=set(),
            _wait_for_model_update_from_disk=self._load_from_disk,
        )
        self._parts._global_state.tokenizer_manager = manager
        self._parts._global_state.scheduler_info = {}

    @property
    def draws(self) -> bool:
        """Whether it would generate now: neither paused, nor in a weight update."""
        return not (self._manager.is_pause or self._manager.model_update_lock._writer_active)

    async def answer(
        self, method: str, path: str, body: Json | None, query: Mapping[str, str] | None = None
    ) -> Reply:
        """Answer a request as SGLang does.

        Args:
            method: of HTTP.
            path: without its query.
            body: None without one.
            query: what follows the path.

        Raises:
            UnknownEndpoint: it has no such path, or not with this method.
            ValidationError: the body is not what it wants there.
            Ended: it answers nothing more.
        """
        route = routes().get((method, path))
        if route is None:
            raise UnknownEndpoint(f"SGLang {SGLANG} does not serve {method} {path}")
        given: Json = {name: float(value) for name, value in (query or {}).items()}
        assert given.keys() <= route.query
        if route.asked is not None:
            given["obj"] = definition(route.asked).model_validate(body)
            given["request"] = SimpleNamespace(json=partial(self._dispatched, body))
        answered = await getattr(self._parts, route.handler)(**given)
        return answered if isinstance(answered, Reply) else Reply(answered)

    async def unload(self, adapter: str) -> None:
        """Unload an adapter, as it does by itself to make room."""
        asked = definition("UnloadLoRAAdapterReqInput")(lora_name=adapter)
        await self._manager.unload_lora_adapter(asked)

    async def _ask(self, name: str, answer: str, asked: Any) -> list[Any]:
        return [await self._play(answer, getattr(self._processes, name)(asked))]

    async def _play(self, answer: str, work: Awaitable[Json], **known: Any) -> Any:
        """Return the simulated result as the message that SGLang expects."""
        try:
            return definition(answer)(**await work, **known)
        except EOFError:
            raise Ended from None
        except Exception as error:
            self._processes.faults.append(f"{answer}: {error!r}")
            raise

    async def _load_from_disk(self, asked: Any) -> tuple[bool, str, int]:
        loading = self._processes.update_weights_from_disk(asked)
        answered = await self._play("UpdateWeightFromDiskReqOutput", loading)
        if answered.success:
            self._manager._update_model_path_info(asked.model_path, asked.load_format)
        return answered.success, answered.message, answered.num_paused_requests

    async def _generate(self, asked: Any, request: Any) -> AsyncIterator[list[Json]]:
        """Respond to a batch in the manager's order, without tokenizing and batching."""
        manager, count = self._manager, len(asked.input_ids)
        async with manager.is_pause_cond:
            await manager.is_pause_cond.wait_for(lambda: not manager.is_pause)
        async with manager.model_update_lock.reader_lock:
            if asked.lora_path is not None:
                asked.lora_path = [asked.lora_path] * count
            await manager._validate_and_resolve_lora(asked)
            answered = [await self._one(asked, index) for index in range(count)]
        yield answered

    async def _one(self, asked: Any, index: int) -> Json:
        rid = uuid.uuid4().hex
        per_prompt = ("token_ids_logprob", "lora_path", "lora_id")
        own = {name: getattr(asked, name) for name in per_prompt}
        mine = {name: each and each[index] for name, each in own.items()}
        state = self._parts.ReqState(
            [], False, asyncio.Event(), asked.model_copy(update={"rid": rid, **mine}), _Times()
        )
        self._manager.rid_to_state[rid] = state
        drawing = self._processes.generate(asked, index)
        answer = await self._play("BatchStrOutput", drawing, rids=[rid])
        await self._manager._handle_batch_output(answer)
        [answered] = state.out_list
        return dict(answered)

    def _record(self, _: str, **changed: Any) -> None:
        assert changed.keys() <= self._config.keys()
        self._config |= changed

    def _resolved(self) -> Json:
        targets = self._processes.lora_target_modules
        settings = {"enable_lora": targets is not None, "lora_target_modules": targets}
        return self._config | settings | {"tp_size": self._processes.tp_size}

    async def _dispatched(self, returned: Any = None) -> Any:
        return returned


class _Times:
    """The timings of a request: none."""

    first_token_time = 0.0
    trace_ctx = SimpleNamespace(tracing_enable=False)

    def set_first_token_time(self, ts: float) -> None:
        self.first_token_time = ts

    def set_last_time(self, ts: float) -> None:
        pass

    def set_finished_time(self, ts: float | None, span_attrs: object) -> None:
        pass

    def get_e2e_latency(self) -> float:
        return 0.0


class EngineRanks:
    """The processes of one engine."""

    def __init__(self, size: int) -> None:
        """Start them.

        Args:
            size: how many.
        """
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        # The fork server has loaded torch once, and has no threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        pipes = [context.Pipe() for _ in range(size)]
        self._ends = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(theirs, rank, size, str(store)), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            # A rank that ends must be the last that holds its end.
            theirs.close()

    async def call(self, method: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Call a method of SGLang's WeightUpdater in each rank.

        Returns:
            What each returned; the words of what it raised, if anything.

        Raises:
            EOFError: a rank has gone.
        """
        calls = [asyncio.to_thread(_ask, end, method, arguments) for end in self._ends]
        return await asyncio.gather(*calls)

    def kill(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def stop(self) -> None:
        """Make the processes hang from now on."""
        for process in self._processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)


def _ask(end: Connection, method: str, arguments: Mapping[str, Any]) -> Any:
    try:
        end.send((method, dict(arguments)))
        return pickle.loads(end.recv_bytes())  # noqa: S301 - of our own process
    except (BrokenPipeError, ConnectionResetError):
        raise EOFError from None


def _serve(end: Connection, rank: int, size: int, store: str) -> None:
    """Serve calls until the connection closes."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    sglang = own_functions()
    updater = SimpleNamespace(tp_rank=rank, device="cpu", _model_update_group={})
    updater._receive_bucketed_weights_from_distributed = lambda **arguments: (
        sglang._receive_bucketed_weights_from_distributed(updater, **arguments)
    )
    while True:
        try:
            method, arguments = end.recv()
        except EOFError:
            return
        answer: Any
        try:
            answer = getattr(sglang, method)(updater, **arguments)
        except Exception as error:  # noqa: BLE001 - SGLang also catches all exceptions
            answer = str(error)
        # Tensors would otherwise be handles of what this process has.
        end.send_bytes(pickle.dumps(answer))
