"""The overhead of the server and the SDK, measured with a tiny model."""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import tinker
import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from benchmarks.shared.measuring import Measurement, medians
from tinkercloud_protocol.requests.hyperparameters import AdamParams, LoraConfig
from tinkercloud_protocol.requests.payloads import decode_forward_backward
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.small_models.models import VOCAB_SIZE, save, tiny_llama
from tinkercloud_worker.engine.batch import prepare
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.torch_trainer.trainer import TorchTrainer

MODEL = "tiny/llama"
PARKED = 500

ROLLOUT_VOCAB_SIZE = 100_000
"""As models have it: the ids of a tiny one take fewer digits in JSON, and fewer bytes."""


def a_datum(length: int) -> types.Datum:
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, length + 1).tolist()
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
            "weights": types.TensorData.from_numpy(np.ones(length, np.float32)),
        },
    )


def a_rollout(length: int) -> types.Datum:
    """Return what a loop of reinforcement learning sends for a sequence of so many tokens."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, ROLLOUT_VOCAB_SIZE, length + 1).tolist()
    logprobs, advantages = random.standard_normal((2, length), np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
            "logprobs": types.TensorData.from_numpy(logprobs),
            "advantages": types.TensorData.from_numpy(advantages),
        },
    )


def encoded(data: list[types.Datum], loss_fn: types.LossFnType = "cross_entropy") -> bytes:
    """Return the body of a forward_backward request, as the SDK sends it."""
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn=loss_fn),
        model_id="s:train:0",
        seq_id=1,
    )
    return forward_backward_request_to_proto(request).SerializeToString()


def measure(_folder: str) -> Iterator[Measurement]:
    with tempfile.TemporaryDirectory() as folder:
        model = save(tiny_llama(), Path(folder) / "model")
        with a_server(Path(folder) / "state", {MODEL: model}) as server:
            yield from _sdk(server)
            yield from asyncio.run(_proxy(server))
    yield _decode()


def _sdk(server: Server) -> Iterator[Measurement]:
    client = server.client()
    training = client.create_lora_training_client(MODEL, rank=4).result()
    data, adam = [a_datum(64)] * 4, types.AdamParams()

    def step(of: tinker.TrainingClient) -> None:
        forward = of.forward_backward(data, "cross_entropy")
        of.optim_step(adam).result()
        forward.result()

    def pipelined(of: tinker.TrainingClient, steps: int = 20) -> None:
        futures: list[tinker.APIFuture[Any]] = []
        for _ in range(steps):
            futures += [of.forward_backward(data, "cross_entropy"), of.optim_step(adam)]
        for future in futures:
            future.result()

    base = TorchBaseModel.load(str(server.models[MODEL]), torch.float32)
    trainer = TorchTrainer(base, max_batch_tokens=2048)
    trainer.add_model("m", LoraConfig(rank=4, seed=1))
    batch = prepare(decode_forward_backward(encoded(data)), trainer.limits)

    def in_process(steps: int = 20) -> None:
        for _ in range(steps):
            trainer.forward_backward("m", batch)
            trainer.optim_step("m", AdamParams())

    optim, one_step, many, alone = medians(
        lambda: training.optim_step(adam).result(),
        lambda: step(training),
        lambda: pipelined(training),
        in_process,
    )
    yield Measurement(
        "C5", "optim_step through the SDK (a peer: 102 ms)", 1e3 * optim, "ms", "<= 20.4", "<= 5.1"
    )
    yield Measurement(
        "C6",
        "pipelined steps/s, 4x64 tokens (a peer: 6.0)",
        20 / many,
        "/s",
        ">= 30",
        ">= 90",
        f"one at a time: {1 / one_step:.0f}/s",
    )
    yield Measurement(
        "C29",
        "that rate / the same steps in process",
        alone / many,
        "x",
        ">= 0.3",
        ">= 0.6",
        f"in process {20 / alone:.0f}/s",
    )

    (publish,) = medians(lambda: training.save_weights_and_get_sampling_client().result())
    yield Measurement(
        "C10", "save_weights_and_get_sampling_client", 1e3 * publish, "ms", "<= 50", "<= 10"
    )


async def _proxy(server: Server) -> list[Measurement]:
    folder = next((server.state_dir / "heads").glob("*/head.json")).parent
    head_url = json.loads((folder / "head.json").read_text())["url"]
    token = (folder / "token").read_text()
    training = server.client().create_lora_training_client(MODEL, rank=4)
    model_id = (await training).model_id
    body = orjson.dumps({"request_id": f"{model_id}:0"})
    direct_headers = {routes.HEAD_TOKEN_HEADER: token, routes.TARGET_HEADER: model_id}
    api_headers = {"X-API-Key": API_KEY}
    async with aiohttp.ClientSession() as client:

        def call(url: str, headers: dict[str, str]) -> Callable[[], Awaitable[None]]:
            async def run() -> None:
                async with client.post(
                    url + routes.RETRIEVE_FUTURE, data=body, headers=headers
                ) as r:
                    await r.read()

            return run

        direct, through = call(head_url, direct_headers), call(server.url, api_headers)
        latencies = await _interleaved(direct, through)
        added = [statistics.quantiles(taken, n=100) for taken in latencies]
        rates = [await _rate(direct), await _rate(through)]
        heartbeat = await _heartbeats_while_parked(client, server)
    return [
        Measurement(
            "C16",
            "proxy, added to a small call / the direct call, p50",
            added[1][49] / added[0][49] - 1,
            "x",
            "<= 1",
            "<= 0.3",
            f"direct {1e6 * added[0][49]:.0f} us; p99 added {1e6 * (added[1][98] - added[0][98]):.0f} us",
        ),
        Measurement(
            "C17",
            "proxy requests/s at 16 / direct",
            rates[1] / rates[0],
            "x",
            ">= 0.25",
            ">= 0.8",
            f"direct {rates[0]:.0f}/s",
        ),
        Measurement(
            "C19",
            f"heartbeat p50 with {PARKED} parked retrieves",
            1e3 * heartbeat[49],
            "ms",
            "<= 5",
            "<= 2",
            f"p99 {1e3 * heartbeat[98]:.1f} ms",
        ),
    ]


async def _interleaved(
    *calls: Callable[[], Awaitable[None]], count: int = 400
) -> list[list[float]]:
    latencies: list[list[float]] = [[] for _ in calls]
    for index in range(count + 50):
        for taken, call in zip(latencies, calls, strict=True):
            start = time.perf_counter()
            await call()
            if index >= 50:
                taken.append(time.perf_counter() - start)
    return latencies


async def _rate(call: Callable[[], Awaitable[None]], seconds: float = 3, width: int = 16) -> float:
    count, end = 0, time.perf_counter() + seconds

    async def loop() -> None:
        nonlocal count
        while time.perf_counter() < end:
            await call()
            count += 1

    await asyncio.gather(*[loop() for _ in range(width)])
    return count / seconds


async def _heartbeats_while_parked(client: aiohttp.ClientSession, server: Server) -> list[float]:
    """Return percentiles of heartbeats while many long polls wait for a request that never runs."""
    training = await server.client().create_lora_training_client(MODEL, rank=4)
    headers = {"X-API-Key": API_KEY}
    gap = orjson.dumps({"model_id": training.model_id, "seq_id": 2, "adam_params": {}})
    async with client.post(server.url + routes.OPTIM_STEP, data=gap, headers=headers) as response:
        await response.read()
    request = orjson.dumps({"request_id": f"{training.model_id}:2"})
    beat = orjson.dumps({"session_id": training.model_id.split(":")[0]})
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as parked:

        async def park() -> None:
            async with parked.post(
                server.url + routes.RETRIEVE_FUTURE, data=request, headers=headers
            ) as r:
                await r.read()

        tasks = [asyncio.create_task(park()) for _ in range(PARKED)]
        await asyncio.sleep(3)
        taken = []
        json_headers = {**headers, "Content-Type": "application/json"}
        for _ in range(200):
            start = time.perf_counter()
            async with client.post(
                f"{server.url}/api/v1/session_heartbeat", data=beat, headers=json_headers
            ) as r:
                await r.read()
            taken.append(time.perf_counter() - start)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return statistics.quantiles(taken, n=100)


def _decode() -> Measurement:
    data = [a_rollout(2048)] * 16
    proto = encoded(data, "importance_sampling")
    as_json = orjson.dumps(
        [
            {"tokens": each.model_input.to_ints()}
            | {name: values.tolist() for name, values in each.loss_fn_inputs.items()}
            for each in data
        ]
    )
    ours, theirs = medians(
        lambda: decode_forward_backward(proto), lambda: orjson.loads(as_json), rounds=21
    )
    return Measurement(
        "C20",
        "decode 16x2048 tokens of rollouts / orjson.loads of the same",
        ours / theirs,
        "x",
        "<= 0.3",
        "<= 0.1",
        f"{len(proto)} bytes in {1e3 * ours:.2f} ms",
    )
