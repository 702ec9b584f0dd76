"""SGLang's native HTTP API over our torch sampler, checked against SGLang's own definitions.

What is computed is real, by the torch sampler, with the adapters and weights that came;
`sglang_definitions` refuses what SGLang does not know, and `sglang_ranks` are in process groups.
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from pydantic import ValidationError
from safetensors.torch import load_file

from tinkercloud_protocol.payloads import SampledSequence
from tinkercloud_protocol.training import LoraConfig
from tinkercloud_testing.engines import Engine
from tinkercloud_testing.models import EOS_TOKEN_ID
from tinkercloud_testing.sglang_definitions import SAMPLING, definition, read_tensors
from tinkercloud_testing.sglang_ranks import EngineRanks
from tinkercloud_worker import lora
from tinkercloud_worker.architecture import from_files
from tinkercloud_worker.engine.sampler import PromptQuestions, SamplingRequest, StopRules
from tinkercloud_worker.engine.trainer import WeightsSnapshot


def _an_event_that_is_set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class FakeSglang:
    """One engine. `calls` are the paths it was asked, with the bodies."""

    engine: Engine
    model_path: Path
    gives_tempered_logprobs: bool = False
    tp_size: int = 1
    max_lora_rank: int = 64
    lacks: frozenset[str] = frozenset()
    """Paths that this SGLang does not know."""
    refuses: frozenset[str] = frozenset()
    """Paths that it answers with an error of its own."""
    ends_over: frozenset[str] = frozenset()
    """Paths over which its process ends, and begins again."""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    """Name to the torch sampler's version."""
    forgotten: set[str] = field(default_factory=set)
    """Adapters that it once had, and has unloaded since."""
    released: set[str] = field(default_factory=set)
    """Kinds of memory it has given away."""
    weight_version: str = "default"
    loaded_path: Path | None = None
    """Where its weights are from, if not from where it was started with."""
    sees_our_memory: bool = True
    """Whether it can open handles of memory on this machine."""
    is_updating: bool = False
    """Whether somebody has begun to send it weights, and not ended."""
    url: str = ""
    ranks: EngineRanks | None = None
    """Its processes in process groups, once there has been one."""
    _weights: dict[str, torch.Tensor] | None = None
    """Its weights, if any have been sent since it last read files."""
    _draws: asyncio.Event = field(default_factory=_an_event_that_is_set)
    """Not set while it is paused."""
    _base: str = "base"
    _published: int = 0
    _held: dict[str, tuple[asyncio.Event, asyncio.Event]] = field(default_factory=dict)
    """Paths it does not answer yet; that one was asked, and that it is answered again."""

    def called(self, path: str) -> list[dict[str, Any]]:
        """Return the bodies of the calls of a path."""
        return [body for name, body in self.calls if name == path]

    def restart(self) -> None:
        """Forget what a new process would not know."""
        self.adapters.clear()
        self.forgotten.clear()
        self.released.clear()
        self._draws.set()
        if self.ranks is not None:
            self.ranks.kill()
            self.ranks = None
        self.is_updating, self._weights = False, None
        self.loaded_path, self.weight_version, self._base = self.model_path, "default", "base"

    def evict(self) -> None:
        """Unload all adapters, as for others that there is no more room beside."""
        self.forgotten |= self.adapters.keys()
        self.adapters.clear()

    @asynccontextmanager
    async def holding(self, path: str) -> AsyncIterator[asyncio.Event]:
        """Answer a path only when the context has ended; the event is that it was asked."""
        was_asked, may_go_on = self._held[path] = asyncio.Event(), asyncio.Event()
        try:
            yield was_asked
        finally:
            del self._held[path]
            may_go_on.set()

    async def generate(self, body: dict[str, Any]) -> web.Response:
        """Answer /generate for a batch."""
        definition("GenerateReqInput").model_validate(body)
        await self._draws.wait()
        self._need_memory()
        name = body.get("lora_path")
        if name is not None and name not in self.adapters:
            loaded = list(self.adapters)
            words = f"Got LoRA adapter that has never been loaded: {name}\nAll loaded: {loaded}"
            if name in self.forgotten:
                words = f"Failed to implicitly load LoRA adapter {name}: Cannot find a snapshot"
            return web.json_response({"error": {"message": words}}, status=400)
        version = self._base if name is None else self.adapters[name]
        items = [await self._one(body, index, version) for index in range(len(body["input_ids"]))]
        return web.json_response(items)

    async def _one(self, body: dict[str, Any], index: int, version: str) -> dict[str, Any]:
        params = body["sampling_params"][index]
        definition("SamplingParams", SAMPLING).model_validate(params)
        request = _request(body, index, params)
        result = await self.engine.sampler.sample(version, request)
        [sequence] = result.sequences
        if params["max_new_tokens"] == 0:
            sequence = SampledSequence([], [], stopped=False)
        elif self.gives_tempered_logprobs:
            sequence = await self._tempered(version, request, sequence)
        meta = {
            "id": f"request-{index}",
            "finish_reason": _finish_reason(sequence),
            "weight_version": self.weight_version,
            "cached_tokens": result.prompt.cached_tokens,
            "output_token_logprobs": [
                [logprob, token, None]
                for token, logprob in zip(sequence.tokens, sequence.logprobs, strict=True)
            ],
        }
        if sequence.top is not None:
            meta["output_top_logprobs"] = _entries(sequence.top.token_ids, sequence.top.logprobs)
        if body["logprob_start_len"] >= 0:
            meta |= _input_logprobs(body, index, request, result.prompt)
        return {"text": "", "output_ids": list(sequence.tokens), "meta_info": meta}

    async def _tempered(
        self, version: str, request: SamplingRequest, sequence: SampledSequence
    ) -> SampledSequence:
        """Return the logprobs of the distribution that was drawn from, as SGLang does unasked."""
        text = [*request.prompt.tolist(), *sequence.tokens]
        every = list(range(self.engine.trainer.limits.vocab_size))
        targets = np.tile(np.asarray(every, np.int64), (len(text) - 1, 1))
        asked = _plain_request(text, PromptQuestions(targets=targets))
        scored = (await self.engine.sampler.sample(version, asked)).prompt.targets
        assert scored is not None
        scaled = scored[len(request.prompt) - 1 :] / request.temperature
        tempered = scaled - np.log(np.exp(scaled).sum(1, keepdims=True))
        picked = [float(tempered[i, token]) for i, token in enumerate(sequence.tokens)]
        return SampledSequence(sequence.tokens, picked, sequence.stopped, sequence.top)

    async def load_lora_adapter(self, body: dict[str, Any]) -> web.Response:
        """Answer /load_lora_adapter."""
        definition("LoadLoRAAdapterReqInput").model_validate(body)
        self._need_memory()
        name, folder = body["lora_name"], Path(body["lora_path"])
        if not folder.is_dir():
            return _lora_answer(f"{folder} does not exist", self.adapters)
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        return await self._load(name, config, tensors)

    async def load_lora_adapter_from_tensors(self, body: dict[str, Any]) -> web.Response:
        """Answer /load_lora_adapter_from_tensors."""
        definition("LoadLoRAAdapterFromTensorsReqInput").model_validate(body)
        self._need_memory()
        return await self._load(body["lora_name"], body["config_dict"], self._tensors(body))

    async def _load(
        self, name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]
    ) -> web.Response:
        if name in self.adapters:
            words = f"Failed to load LoRA adapter {name} because it is already loaded"
            return _lora_answer(words, self.adapters)
        if config["r"] > self.max_lora_rank:
            words = f"LoRA adapter {name} with rank {config['r']} is incompatible"
            return _lora_answer(words, self.adapters)
        weights = WeightsSnapshot(LoraConfig(rank=config["r"]), lora.from_peft_names(tensors))
        self.adapters[name] = await self._publish(weights)
        return _lora_answer(None, self.adapters)

    def _tensors(self, body: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Read what a request carries: a copy for each rank, of which it reads its own."""
        assert body["load_format"] == "flattened_bucket"
        copies = body["serialized_named_tensors"]
        if not self.sees_our_memory and b"rebuild_storage" in base64.b64decode(copies[0]):
            raise EOFError
        assert len(copies) == self.tp_size, f"{len(copies)} copies for {self.tp_size} ranks"
        [tensors, *others] = [read_tensors(copy) for copy in copies]
        for other in others:
            assert all(torch.equal(tensor, other[name]) for name, tensor in tensors.items())
        return tensors

    async def unload_lora_adapter(self, body: dict[str, Any]) -> web.Response:
        """Answer /unload_lora_adapter."""
        definition("UnloadLoRAAdapterReqInput").model_validate(body)
        self._need_memory()
        if self.adapters.pop(body["lora_name"], None) is None:
            return _lora_answer(f"LoRA with name {body['lora_name']} does not exist.", {})
        self.forgotten.add(body["lora_name"])
        return _lora_answer(None, self.adapters)

    async def update_weights_from_disk(self, body: dict[str, Any]) -> web.Response:
        """Answer /update_weights_from_disk."""
        definition("UpdateWeightFromDiskReqInput").model_validate(body)
        self._need_memory()
        folder = Path(body["model_path"])
        if not (folder / "config.json").exists():
            words = f"{folder} does not exist"
            return web.json_response({"success": False, "message": words}, status=400)
        tensors = load_file(folder / "model.safetensors")
        self._base = await self._publish(self._model(tensors))
        self.loaded_path, self._weights = folder, None
        self.weight_version = body["weight_version"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def begin_weight_update(self, body: dict[str, Any]) -> web.Response:
        """Answer /begin_weight_update."""
        definition("BeginWeightUpdateReqInput").model_validate(body)
        if self.is_updating:
            return _weights_answer("a weight-update session is already open")
        self.is_updating = True
        return _weights_answer(None)

    async def update_weights_from_tensor(self, body: dict[str, Any]) -> web.Response:
        """Answer /update_weights_from_tensor."""
        definition("UpdateWeightsFromTensorReqInput").model_validate(body)
        if not self.is_updating:
            return _weights_answer("must run between begin_weight_update() and end_weight_update()")
        await self._replace(self._tensors(body))
        return _weights_answer(None)

    async def init_weights_update_group(self, body: dict[str, Any]) -> web.Response:
        """Answer /init_weights_update_group."""
        definition("InitWeightsUpdateGroupReqInput").model_validate(body)
        if self.ranks is None:
            self.ranks = EngineRanks(self.tp_size)
        return _of_all(await self.ranks.call("init_weights_update_group", body))

    async def destroy_weights_update_group(self, body: dict[str, Any]) -> web.Response:
        """Answer /destroy_weights_update_group."""
        definition("DestroyWeightsUpdateGroupReqInput").model_validate(body)
        if self.ranks is None:
            return _weights_answer("The group to be destroyed does not exist.")
        return _of_all(await self.ranks.call("destroy_weights_update_group", body))

    async def update_weights_from_distributed(self, body: dict[str, Any]) -> web.Response:
        """Answer /update_weights_from_distributed."""
        definition("UpdateWeightsFromDistributedReqInput").model_validate(body)
        if not self.is_updating:
            return _weights_answer("must run between begin_weight_update() and end_weight_update()")
        if self.ranks is None:
            return _weights_answer("Failed to receive weights: Group not in []")
        wanted = ("names", "dtypes", "shapes", "group_name", "load_format")
        asked = {name: body[name] for name in wanted if name in body}
        received = await self.ranks.call("receive_weights_from_distributed", asked)
        for words in received:
            if isinstance(words, str):
                return _weights_answer(f"Failed to receive weights: {words}")
        [tensors, *others] = [dict(each) for each in received]
        for other in others:
            assert all(torch.equal(tensor, other[name]) for name, tensor in tensors.items())
        await self._replace(tensors)
        return _weights_answer(None)

    def _need_memory(self) -> None:
        """End, as SGLang does over what it is asked without its memory."""
        if self.released:
            raise EOFError

    async def _replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors in place of those of the same names."""
        if self._weights is None:
            self._weights = load_file((self.loaded_path or self.model_path) / "model.safetensors")
        for name, tensor in tensors.items():
            assert tensor.shape == self._weights[name].shape
            self._weights[name] = tensor.clone()
        self._base = await self._publish(self._model(self._weights))

    async def end_weight_update(self, body: dict[str, Any]) -> web.Response:
        """Answer /end_weight_update."""
        definition("EndWeightUpdateReqInput").model_validate(body)
        if not self.is_updating:
            return _weights_answer("no weight-update session is open")
        self.is_updating = False
        return _weights_answer(None)

    async def update_weight_version(self, body: dict[str, Any]) -> web.Response:
        """Answer /update_weight_version."""
        definition("UpdateWeightVersionReqInput").model_validate(body)
        self.weight_version = body["new_version"]
        return web.json_response({"success": True, "new_version": self.weight_version})

    async def release_memory_occupation(self, body: dict[str, Any]) -> web.Response:
        """Answer /release_memory_occupation."""
        definition("ReleaseMemoryOccupationReqInput").model_validate(body)
        self._need_memory()
        self.released |= set(body["tags"])
        return web.json_response(None)

    async def resume_memory_occupation(self, body: dict[str, Any]) -> web.Response:
        """Answer /resume_memory_occupation."""
        definition("ResumeMemoryOccupationReqInput").model_validate(body)
        if not set(body["tags"]) <= self.released:
            raise EOFError
        self.released -= set(body["tags"])
        return web.json_response(None)

    async def pause_generation(self, body: dict[str, Any]) -> web.Response:
        """Answer /pause_generation."""
        definition("PauseGenerationReqInput").model_validate(body)
        self._draws.clear()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, body: dict[str, Any]) -> web.Response:
        """Answer /continue_generation."""
        definition("ContinueGenerationReqInput").model_validate(body)
        self._draws.set()
        return web.json_response({"message": "Generation continued.", "status": "ok"})

    def _model(self, tensors: Mapping[str, torch.Tensor]) -> WeightsSnapshot:
        """Return a model that has come by the names of its files."""
        return WeightsSnapshot(None, from_files(str(self.model_path), tensors))

    async def _publish(self, weights: WeightsSnapshot) -> str:
        self._published += 1
        version = f"{self.url}/{self._published}"
        await self.engine.sampler.publish(version, weights)
        return version

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer any request."""
        if request.path == "/health_generate":
            return web.Response(status=200 if self._draws.is_set() else 503)
        if request.method == "GET":
            return web.json_response(self._tell(request.path))
        body = await request.json()
        self.calls.append((request.path, body))
        if request.path in self.lacks:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.path in self.refuses:
            return web.json_response({"error": {"message": "refused"}}, status=500)
        if request.path in self.ends_over:
            return self._end(request)
        if request.path in self._held:
            was_asked, may_go_on = self._held[request.path]
            was_asked.set()
            await may_go_on.wait()
        try:
            answer: web.Response = await getattr(self, request.path.removeprefix("/"))(body)
        except EOFError:
            # Its ranks have gone: SGLang's end over what they can't open, or have no memory for.
            return self._end(request)
        except (ValidationError, AssertionError) as error:
            return web.json_response({"error": {"message": str(error)}}, status=422)
        return answer

    def _tell(self, path: str) -> dict[str, Any]:
        path_of_model = str(self.loaded_path or self.model_path)
        model = {"model_path": path_of_model, "weight_version": self.weight_version}
        told: dict[str, dict[str, Any]] = {
            "/model_info": {**model, "is_generation": True},
            "/server_info": {"tp_size": self.tp_size},
        }
        return told[path]

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
    """Let a fake be reached for as long as the context lasts; port 0 takes a free one."""
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


def _request(body: dict[str, Any], index: int, params: Mapping[str, Any]) -> SamplingRequest:
    stops = frozenset(params.get("stop_token_ids") or ())
    ends = frozenset() if params.get("ignore_eos") else stops | {EOS_TOKEN_ID}
    return SamplingRequest(
        prompt=np.asarray(body["input_ids"][index], np.int32),
        num_samples=1,
        max_tokens=max(params["max_new_tokens"], 1),
        seed=params.get("sampling_seed", 42),
        temperature=params["temperature"],
        top_k=max(params.get("top_k", -1), 0),
        top_p=params.get("top_p", 1.0),
        stop=StopRules(ends, tuple(params.get("stop") or ())),
        top_logprobs=body["top_logprobs_num"],
        questions=_questions(body, index),
    )


def _plain_request(prompt: list[int], questions: PromptQuestions) -> SamplingRequest:
    ends = StopRules(frozenset(), ())
    tokens = np.asarray(prompt, np.int32)
    return SamplingRequest(tokens, 1, 1, 1, 0.0, 0, 1.0, ends, questions=questions)


def _questions(body: dict[str, Any], index: int) -> PromptQuestions:
    start, length = body["logprob_start_len"], len(body["input_ids"][index])
    if start < 0 or length == 1:
        return PromptQuestions()
    ids = body.get("token_ids_logprob")
    rows = np.tile(np.asarray(ids[index], np.int64), (length - 1, 1)) if ids else None
    return PromptQuestions(start + 1, body["top_logprobs_num"], rows)


def _input_logprobs(
    body: dict[str, Any], index: int, request: SamplingRequest, prompt: Any
) -> dict[str, Any]:
    """Return what SGLang says of positions from logprob_start_len on: of the first, nothing."""
    start, tokens = body["logprob_start_len"], request.prompt.tolist()
    answer: dict[str, Any] = {
        "input_token_logprobs": [[None, tokens[start], None]]
        + [[float(prompt.logprobs[i]), tokens[i], None] for i in range(start + 1, len(tokens))]
    }
    if prompt.top is not None:
        rows = slice(start + 1, None)
        entries = _entries(prompt.top.token_ids[rows], prompt.top.logprobs[rows])
        answer["input_top_logprobs"] = [None, *entries]
    if prompt.targets is not None:
        ids = np.asarray([body["token_ids_logprob"][index]] * (len(tokens) - 1))
        answer["input_token_ids_logprobs"] = [
            None,
            *_entries(ids[start:], prompt.targets[start:]),
        ]
    return answer


def _entries(ids: Any, logprobs: Any) -> list[list[list[Any]]]:
    return [
        [[float(value), int(token), None] for token, value in zip(*row, strict=True)]
        for row in zip(ids, logprobs, strict=True)
    ]


def _finish_reason(sequence: SampledSequence) -> dict[str, Any]:
    if sequence.stopped:
        return {"type": "stop", "matched": sequence.tokens[-1]}
    return {"type": "length", "length": len(sequence.tokens)}


def _of_all(answers: Sequence[Any]) -> web.Response:
    """Return what an engine makes of (whether it went well, words) of each of its ranks."""
    words = [answer if isinstance(answer, str) else answer[1] for answer in answers]
    is_good = all(not isinstance(answer, str) and answer[0] for answer in answers)
    return _weights_answer(None if is_good else " | ".join(words))


def _weights_answer(error: str | None) -> web.Response:
    body = {"success": error is None, "message": error or "Success"}
    return web.json_response(body, status=200 if error is None else 400)


def _lora_answer(error: str | None, loaded: Mapping[str, str]) -> web.Response:
    body = {"success": error is None, "error_message": error, "loaded_adapters": dict(loaded)}
    definition("LoRAUpdateOutput").model_validate(body)
    return web.json_response(body, status=200 if error is None else 400)
