"""Requests of several owners take turns to compute, and say what they wait for."""

import asyncio
import threading
from pathlib import Path

import orjson

from tinkercloud_protocol.heads.launch import Limits, ModelSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.bare_heads import a_head
from tinkercloud_worker.head.order.requests import receive_json
from tinkercloud_worker.head.serve.service import HeadService

REASON = "waiting for its turn to compute; requests before it: {} ({} tokens)"
FOR_THE_ENGINE = "waiting for the engine, which computes for another request"


async def a_model(service: HeadService, owner: str, index: int) -> str:
    model_id = ModelId(owner, index)
    await service.create_model(
        model_id, ModelSpec(owner=owner, lora=LoraConfig(rank=2, seed=index))
    )
    await service.retrieve(f"{model_id}:0")
    return str(model_id)


def step(service: HeadService, model: str) -> str:
    body = {"model_id": model, "seq_id": 1, "adam_params": {}}
    return service.submit(receive_json(routes.OPTIM_STEP, orjson.dumps(body)))


async def test_a_request_that_waits_for_its_turn_says_how_much_runs_before_it(
    tmp_path: Path,
) -> None:
    limits = Limits(owner_weights={"bob": 2})
    with a_head(tmp_path.as_uri(), tmp_path, "g1", limits=limits) as head:
        service, thread = head.service, head.backend.thread
        models = [await a_model(service, "eve", index) for index in range(3)]
        models.append(await a_model(service, "bob", 0))
        is_held, may_end = threading.Event(), threading.Event()

        def hold(_yield_point: object) -> None:
            is_held.set()
            may_end.wait()

        holding = asyncio.create_task(thread.run(hold))
        await asyncio.to_thread(is_held.wait)
        sent = [step(service, model) for model in models]
        created = asyncio.create_task(a_model(service, "zoe", 0))

        def all_wait() -> bool:
            reasons = [service.why_waiting(request)[1] or "" for request in sent]
            return all(reason.startswith("waiting for its turn") for reason in reasons)

        await asyncio.to_thread(wait_until, all_wait, "all wait for the engine")

        held = {each.model_id: (each.queue_state, each.queue_reason) for each in service.held()}
        reasons = [service.why_waiting(request) for request in sent]
        may_end.set()
        await holding

        assert held["zoe:train:0"] == ("waiting", FOR_THE_ENGINE)
        assert reasons == [("active", REASON.format(items, 8 * items)) for items in (0, 2, 3, 1)]
        for request in sent:
            result = await service.retrieve(request)
            assert result is not None
            assert b"error" not in result.body
        await created
