"""Clients wait for a head that takes longer to load than the SDK repeats a submission."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import tinker
from tinker import types
from tinker.lib import internal_client_holder, queue_state_logger

from tinkercloud_api.checkpoints.deferred_requests import Deferred, DeferredRequests
from tinkercloud_api.checkpoints.object_store_client import ObjectStoreClient
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import HeadEndpoint, HeadFailed
from tinkercloud_api.providers.cluster.cluster_errors import ClusterRejected
from tinkercloud_api.serve.api_app import Application
from tinkercloud_protocol.heads.launch import Limits, Timings
from tinkercloud_protocol.heads.object_store import open_store
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest, Overloaded
from tinkercloud_testing.clients.sdk_clients import SdkClients, sampling_session_of
from tinkercloud_testing.clients.sdk_steps import ADAM, a_datum, step
from tinkercloud_testing.serving.bare_heads import until
from tinkercloud_testing.serving.providers import LoadingHead
from tinkercloud_testing.serving.served_heads import TOKEN, a_served_head, served

KEY = "tml-of-those-who-wait-for-heads"
HURRY = 10_000
"""How much faster the SDK's clock runs: its five minutes are 0.03 s."""


@dataclass
class World:
    """An API server, its head, and the clients."""

    settings: Settings
    provider: LoadingHead
    url: str = ""
    clients: SdkClients = field(default_factory=SdkClients)

    async def training_client(self) -> tinker.TrainingClient:
        """Create a model, once the head is ready."""
        service = await asyncio.to_thread(self.clients.make, self.url, KEY)
        create = service.create_lora_training_client
        return await asyncio.to_thread(lambda: create("tiny", rank=2, seed=1).result())

    def stored(self) -> list[Path]:
        """Return the deferred requests."""
        folder = self.settings.state_dir.parent / "store" / "deferred"
        return [path for path in folder.rglob("*") if path.is_file()]


@asynccontextmanager
async def serving(world: World) -> AsyncIterator[None]:
    """Run the API server."""
    application = Application(world.settings, world.provider)
    async with served(application) as world.url:
        yield


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    settings = Settings(
        state_dir=tmp_path / "state",
        checkpoint_root=(tmp_path / "store").as_uri(),
        bootstrap_key=KEY,
        timings=Timings(long_poll_seconds=0.05),
    )
    world = World(settings, LoadingHead())
    async with a_served_head(tmp_path) as head:
        world.provider.endpoint = HeadEndpoint(head.url, TOKEN, "g1")
        fast = SimpleNamespace(time=lambda: time.time() * HURRY, monotonic=time.monotonic)
        monkeypatch.setattr(internal_client_holder, "time", fast)
        monkeypatch.setattr(queue_state_logger, "PAUSE_GRACE_PERIOD", 0)
        yield world
        world.clients.close()


async def test_a_training_loop_waits_for_a_head_that_loads_longer_than_the_sdk_repeats_requests(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tinker")
    world.provider.ready.set()
    async with serving(world):
        training = await world.training_client()
        uninterrupted = await world.training_client()
        expected = [await asyncio.to_thread(step, uninterrupted) for _ in range(3)]
        first = await asyncio.to_thread(step, training)
        world.provider.ready.clear()

        second = training.forward_backward([a_datum()], "cross_entropy")
        optim = training.optim_step(ADAM)
        state = training.save_state("here")
        named = training.save_weights_for_sampler("there")
        loaded = training.load_state("tinker://nowhere/weights/missing")
        third = training.forward_backward([a_datum()], "cross_entropy")
        await until(lambda: len(world.stored()) == 6)
        await until(lambda: "the model is loading" in caplog.text)
        assert not any(each.future().done() for each in (optim, state, named, loaded))
        world.provider.ready.set()

        await asyncio.to_thread(optim.result)
        losses = [first] + [
            (await asyncio.to_thread(each.result)).metrics["loss:sum"] for each in (second, third)
        ]
        assert losses == expected
        assert (await asyncio.to_thread(state.result)).path.endswith("/here")
        assert (await asyncio.to_thread(named.result)).path.endswith("/there")
        with pytest.raises(tinker.RequestFailedError, match="model_id 'nowhere' is malformed"):
            await asyncio.to_thread(loaded.result)
        listed = await asyncio.to_thread(
            lambda: (
                tinker.RestClient(base_url=world.url, api_key=KEY)
                .list_checkpoints(training.model_id)
                .result()
            )
        )
        assert sorted(each.checkpoint_type for each in listed.checkpoints) == [
            "sampler",
            "training",
        ]
        await until(lambda: not world.stored())


async def test_samples_and_new_models_wait_for_a_head_that_loads(world: World) -> None:
    async with serving(world):
        service = await asyncio.to_thread(world.clients.make, world.url, KEY)
        sampler = await asyncio.to_thread(
            lambda: service.create_sampling_client(base_model="tiny").result()
        )
        prompt, params = types.ModelInput.from_ints([5, 6]), types.SamplingParams(max_tokens=3)
        samples = [sampler.sample(prompt, 2, params) for _ in range(5)]
        creating = asyncio.create_task(world.training_client())
        await until(lambda: len(world.stored()) == 5)
        world.provider.ready.set()

        answers = [await asyncio.to_thread(each.result) for each in samples]
        assert [len(each.sequences) for each in answers] == [2] * 5
        assert (await creating).model_id


async def test_what_a_stopped_server_has_promised_is_delivered_by_the_next(world: World) -> None:
    world.provider.ready.set()
    async with serving(world):
        training = await world.training_client()
        world.provider.ready.clear()
        body = {"model_id": training.model_id, "seq_id": 1, "adam_params": {}}
        promise = await post(world, routes.OPTIM_STEP, body)
    assert promise[0] == 200
    assert promise[1]["request_id"] == f"{training.model_id}:1"

    world.provider.ready.set()
    async with serving(world):
        answer = await result_of(world, f"{training.model_id}:1")
    assert answer[0] == 200
    assert "error" not in answer[1]


async def test_a_request_that_only_the_head_can_number_gets_503_with_the_reason(
    world: World,
) -> None:
    world.provider.ready.set()
    async with serving(world):
        training = await world.training_client()
        world.provider.ready.clear()

        body = {"model_id": training.model_id, "adam_params": {}}
        assert await post(world, routes.OPTIM_STEP, body) == (
            503,
            {"detail": "the model is loading"},
        )


async def test_a_request_for_more_samples_than_a_head_accepts_is_not_promised(
    world: World,
) -> None:
    async with serving(world):
        service = await asyncio.to_thread(world.clients.make, world.url, KEY)
        client = await asyncio.to_thread(
            lambda: service.create_sampling_client(base_model="tiny").result()
        )
        body = a_sample(sampling_session_of(client), 1) | {"num_samples": 1025}

        status, answer = await post(world, routes.ASAMPLE, body)
        assert (status, answer) == (400, {"detail": "num_samples: must be 1 to 1024, got 1025"})
        assert not world.stored()
        status, answer = await post(world, routes.ASAMPLE, body | {"num_samples": 1024})
        assert status == 200, answer


async def test_a_submission_that_waits_for_a_head_is_promised_when_the_server_stops(
    world: World,
) -> None:
    world.provider.ready.set()
    world.settings = world.settings.model_copy(update={"timings": Timings(long_poll_seconds=500.0)})
    application = Application(world.settings, world.provider)
    async with served(application) as world.url:
        model_id = (await world.training_client()).model_id
        polls = application._running().long_polls
        world.provider.ready.clear()
        steps = asyncio.create_task(defer_steps(world, model_id, [1]))
        await until(lambda: len(polls) == 1)
        polls.shut_down()

        await steps
        assert len(world.stored()) == 1


async def test_a_poll_that_a_stopping_server_ends_says_who_continues(world: World) -> None:
    world.provider.ready.set()
    world.settings = world.settings.model_copy(update={"timings": Timings(long_poll_seconds=500.0)})
    application = Application(world.settings, world.provider)
    async with served(application) as world.url:
        model_id = (await world.training_client()).model_id
        polls = application._running().long_polls
        world.provider.ready.clear()
        body = {"request_id": f"{model_id}:1"}
        poll = asyncio.create_task(post(world, routes.RETRIEVE_FUTURE, body))
        await until(lambda: len(polls) == 1)
        polls.shut_down()

        status, answer = await poll
    assert (status, answer["queue_state"]) == (408, "paused_capacity")
    assert "the server is stopping; the next server process" in answer["queue_state_reason"]


async def test_promised_requests_outlast_a_cluster_that_rejects_their_head_for_a_time(
    world: World,
) -> None:
    world.provider.ready.set()
    async with serving(world):
        model_id = (await world.training_client()).model_id
        await defer_steps(world, model_id, [1])
        world.provider.failure = ClusterRejected("exceeded quota")
        world.provider.ready.set()
        await until(lambda: world.provider.num_failures > 0)
        world.provider.failure = None

        answer = await result_of(world, f"{model_id}:1")
    assert answer[0] == 200
    assert "error" not in answer[1]


async def test_a_request_whose_failure_was_reported_does_not_run_and_leaves_no_gap(
    world: World,
) -> None:
    world.provider.ready.set()
    async with serving(world):
        model_id = (await world.training_client()).model_id
        await defer_steps(world, model_id, [1, 2])
        world.provider.failure = HeadFailed("no memory is left")
        world.provider.ready.set()
        reported = await result_of(world, f"{model_id}:1")
        assert "no memory is left" in reported[1]["error"]
        assert len(world.stored()) == 2
        world.provider.failure = None

        following = await result_of(world, f"{model_id}:2")
        assert following[0] == 200
        assert "error" not in following[1]
        rejected = await result_of(world, f"{model_id}:1")
        assert "no memory is left" in rejected[1]["error"]


async def test_a_sample_that_is_cancelled_while_the_head_loads_is_not_sampled(
    world: World,
) -> None:
    async with serving(world):
        service = await asyncio.to_thread(world.clients.make, world.url, KEY)
        client = await asyncio.to_thread(
            lambda: service.create_sampling_client(base_model="tiny").result()
        )
        sampler_id = sampling_session_of(client)
        for seq_id in (1, 2):
            assert (await post(world, routes.ASAMPLE, a_sample(sampler_id, seq_id)))[0] == 200
        await post(world, routes.CANCEL_FUTURE, {"request_id": f"{sampler_id}:1"})
        assert len(world.stored()) == 1
        world.provider.ready.set()

        assert (await result_of(world, f"{sampler_id}:2"))[0] == 200
        assert (await result_of(world, f"{sampler_id}:1"))[0] == 410


def a_sample(sampler_id: str, seq_id: int) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
        "sampling_params": {"max_tokens": 1},
    }


async def defer_steps(world: World, model_id: str, seq_ids: list[int]) -> None:
    """Send optimizer steps while the head is loading."""
    world.provider.ready.clear()
    for seq_id in seq_ids:
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {}}
        assert (await post(world, routes.OPTIM_STEP, body))[0] == 200


async def result_of(world: World, request_id: str) -> tuple[int, dict[str, Any]]:
    """Poll until there is a result."""
    poll = {"request_id": request_id}
    while (answer := await post(world, routes.RETRIEVE_FUTURE, poll))[0] == 408:
        pass
    return answer


async def post(world: World, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    headers = {routes.API_KEY_HEADER: KEY}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(world.url + path, json=body) as answer,
    ):
        return answer.status, await answer.json()


def a_request(seq_id: int, body: bytes = b"{}") -> Deferred:
    return Deferred("s:train:0", seq_id, "me", "/p", {"accept": "x"}, {"ours": "y"}, body)


@pytest.fixture
def deferred(tmp_path: Path) -> DeferredRequests:
    return DeferredRequests(ObjectStoreClient(open_store(tmp_path.as_uri())))


async def test_deferred_requests_come_back_in_order_and_damaged_ones_do_not(
    tmp_path: Path, deferred: DeferredRequests
) -> None:
    for seq_id in (10, 9, 11):
        await deferred.add(a_request(seq_id, b"{%d}" % seq_id))
    damaged = tmp_path / "deferred/s:train:0" / f"{11:020d}"
    content = bytearray(damaged.read_bytes())
    content[-2] ^= 1
    damaged.write_bytes(content)

    found = [request async for request in deferred.of_target("s:train:0")]
    assert found == [a_request(9, b"{9}"), a_request(10, b"{10}")]
    assert not damaged.exists()


async def test_a_file_that_a_killed_process_was_writing_is_no_request(
    tmp_path: Path, deferred: DeferredRequests
) -> None:
    await deferred.add(a_request(1))
    whole = tmp_path / "deferred/s:train:0" / f"{1:020d}"
    whole.rename(whole.with_name(f"{whole.name}.{'ab' * 16}"))

    assert not await deferred.has_any("s:train:0")
    assert [request async for request in deferred.of_target("s:train:0")] == []
    await deferred.remove_all("s:train:0")
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


async def test_a_request_is_read_only_when_it_is_its_turn(deferred: DeferredRequests) -> None:
    for seq_id in (1, 2, 3):
        await deferred.add(a_request(seq_id))
    requests = deferred.of_target("s:train:0")

    assert (await anext(requests)).seq_id == 1
    await deferred.remove("s:train:0", 2)
    assert [request.seq_id async for request in requests] == [3]


async def test_a_damaged_request_is_replaced_when_it_is_sent_again(
    tmp_path: Path, deferred: DeferredRequests
) -> None:
    await deferred.add(a_request(1))
    (tmp_path / a_request(1).key).write_bytes(b"damaged")

    await deferred.add(a_request(1))

    assert [each async for each in deferred.of_target("s:train:0")] == [a_request(1)]


async def test_requests_that_another_replica_has_delivered_do_not_count(
    tmp_path: Path, deferred: DeferredRequests
) -> None:
    await deferred.add(a_request(1))
    other = DeferredRequests(ObjectStoreClient(open_store(tmp_path.as_uri())))
    await other.remove("s:train:0", 1)

    assert not await deferred.has_any("s:train:0")
    with deferred.room("me", 4096, 4096):
        pass


async def test_the_deferred_requests_of_an_owner_have_a_limit_of_bytes(
    deferred: DeferredRequests,
) -> None:
    limit = Limits(max_queued_bytes=10_000).max_queued_bytes
    for seq_id in (1, 2):
        with deferred.room("me", 3000, limit):
            await deferred.add(a_request(seq_id))

    with (
        pytest.raises(Overloaded, match="8192 bytes of requests of owner 'me'"),
        deferred.room("me", 3000, limit),
    ):
        pass
    with deferred.room("another", 3000, limit):
        pass
    await deferred.remove("s:train:0", 1)
    with deferred.room("me", 3000, limit):
        pass


async def test_a_number_is_not_promised_twice_for_different_requests(
    deferred: DeferredRequests,
) -> None:
    await deferred.add(a_request(1))
    await deferred.add(a_request(1))

    with pytest.raises(InvalidRequest, match="seq_id: 1 was already used"):
        await deferred.add(a_request(1, b"other"))
