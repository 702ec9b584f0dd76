"""Requests without a seq_id run in the order of their arrival; a key makes them repeatable."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire import future_responses, routes
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.served_heads import Answer, ServedHead, a_served_head
from tinkercloud_worker.head.order import requests
from tinkercloud_worker.head.order.sequencer import Sequencer

MODEL = "s:train:0"
BATCH: dict[str, Any] = {
    "loss_fn": "cross_entropy",
    "data": [
        {
            "model_input": {"tokens": [5, 6, 7]},
            "loss_fn_inputs": {"target_tokens": [6, 7, 8], "weights": [1, 0.1, 1]},
        }
    ],
}
STEP: dict[str, Any] = {"adam_params": {"learning_rate": 0.01}}


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[ServedHead]:
    async with a_served_head(tmp_path) as head:
        await head.begin(MODEL, ModelSpec(owner="me", lora=LoraConfig(rank=2, seed=1)))
        yield head


async def sent(head: ServedHead, path: str, key: str | None = None, /, **fields: Any) -> Answer:
    headers = {"content-type": future_responses.JSON}
    if key is not None:
        headers[routes.IDEMPOTENCY_HEADER] = key
    body = orjson.dumps({**fields, "model_id": MODEL})
    return await head.send(path, body, MODEL, **headers)


async def metrics(head: ServedHead, request_id: str) -> dict[str, float]:
    answer = await head.result(request_id, accept=future_responses.JSON)
    found: dict[str, float] = orjson.loads(answer.body)["metrics"]
    return found


def in_protobuf(seq_id: int) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([5, 6, 7], "<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array([6, 7, 8], "<i8").tobytes(), pb.DTYPE_INT64
    return message.SerializeToString()


async def test_requests_run_in_the_order_of_arrival_although_the_first_takes_long_to_parse(
    head: ServedHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, may_end = threading.Event(), threading.Event()

    def slow(path: str, body: bytes) -> requests.Received:
        started.set()
        may_end.wait()
        return receive(path, body)

    receive = requests.receive_json_batch
    monkeypatch.setattr(requests, "receive_json_batch", slow)
    first = asyncio.create_task(sent(head, routes.FORWARD_BACKWARD, **BATCH))
    await asyncio.to_thread(wait_until, started.is_set, "the first is being parsed")
    others = [asyncio.create_task(sent(head, routes.OPTIM_STEP, **STEP)) for _ in range(3)]
    in_order = asyncio.create_task(sent(head, routes.FORWARD_BACKWARD, **BATCH))
    done, _ = await asyncio.wait(others, timeout=0.2)
    assert not done
    may_end.set()

    ids = [(await each).request_id for each in (first, *others)]

    assert ids[0] == f"{MODEL}:1"
    assert sorted(ids) == [f"{MODEL}:{number}" for number in (1, 2, 3, 4)]
    assert (await metrics(head, f"{MODEL}:2"))["step"] == 1
    assert (await in_order).request_id == f"{MODEL}:5"


async def test_protobuf_without_a_number_comes_after_what_has_arrived(head: ServedHead) -> None:
    for number in (1, 2):
        answer = await head.send(routes.FORWARD_BACKWARD, in_protobuf(0), MODEL)
        assert answer.request_id == f"{MODEL}:{number}"
    invalid = await head.send(routes.FORWARD_BACKWARD, in_protobuf(0)[:-5], MODEL)

    assert invalid.status == 400
    assert "not valid protobuf" in invalid.detail
    assert (await sent(head, routes.OPTIM_STEP, **STEP)).request_id == f"{MODEL}:3"
    assert "error" not in orjson.loads((await head.result(f"{MODEL}:3")).body)


async def test_a_repeated_key_is_the_same_request(head: ServedHead) -> None:
    first = await sent(head, routes.FORWARD_BACKWARD, "a", **BATCH)
    again = await sent(head, routes.FORWARD_BACKWARD, "a", **BATCH)
    other = await sent(head, routes.FORWARD_BACKWARD, "b", **BATCH)
    await head.result(first.request_id)
    late = await sent(head, routes.FORWARD_BACKWARD, "a", **BATCH)
    abused = await sent(head, routes.OPTIM_STEP, "a", **STEP)
    endless = await sent(head, routes.OPTIM_STEP, "k" * 257, **STEP)

    assert {first.request_id, again.request_id, late.request_id} == {f"{MODEL}:1"}
    assert other.request_id == f"{MODEL}:2"
    assert abused.status == endless.status == 400
    assert "'a' was already used for request 1 of this model" in abused.detail
    assert "must have 1 to 256 characters, got 257" in endless.detail


async def test_requests_with_and_without_numbers_never_take_each_others(head: ServedHead) -> None:
    ahead = await sent(head, routes.OPTIM_STEP, seq_id=3, **STEP)
    behind = await sent(head, routes.OPTIM_STEP, **STEP)
    for number in (1, 2):
        await head.send(routes.FORWARD_BACKWARD, in_protobuf(number), MODEL)
    taken = await sent(head, routes.FORWARD_BACKWARD, seq_id=4, **BATCH)
    free = await sent(head, routes.FORWARD_BACKWARD, seq_id=5, **BATCH)

    assert ahead.request_id == f"{MODEL}:3"
    assert behind.request_id == f"{MODEL}:4"
    assert taken.status == 400
    assert "seq_id 4 was already used by a request with different content" in taken.detail
    assert "send a seq_id with all of its requests, or with none" in taken.detail
    assert (await metrics(head, free.request_id))["loss:sum"] > 0


async def test_an_equal_batch_under_a_number_that_was_given_away_is_another_request(
    head: ServedHead,
) -> None:
    await head.send(routes.FORWARD_BACKWARD, in_protobuf(0), MODEL)

    numbered = await head.send(routes.FORWARD_BACKWARD, in_protobuf(1), MODEL)

    assert numbered.status == 400


async def test_an_invalid_request_without_a_number_is_rejected_at_once(head: ServedHead) -> None:
    batch = await sent(head, routes.FORWARD_BACKWARD, data=[5], loss_fn="cross_entropy")
    step = await sent(head, routes.OPTIM_STEP, adam_params={"learning_rate": "fast"})

    assert batch.status == step.status == 400
    assert "data[0]: must be an object" in batch.detail
    assert "learning_rate" in step.detail
    assert (await sent(head, routes.OPTIM_STEP, **STEP)).request_id == f"{MODEL}:1"


async def test_a_forward_pass_in_json_adds_no_gradient(head: ServedHead) -> None:
    inner: dict[str, Any] = {"forward_input": BATCH}
    passes = [
        await sent(head, routes.FORWARD, **inner),
        await sent(head, routes.FORWARD_BACKWARD, forward_only=True, **BATCH),
    ]
    empty = await sent(head, routes.OPTIM_STEP, **STEP)

    losses = [(await metrics(head, each.request_id))["loss:sum"] for each in passes]
    assert losses[0] == losses[1] > 0
    assert (await metrics(head, empty.request_id))["grad_norm"] == 0


async def test_samples_without_a_number_have_ids_that_the_sdk_never_uses(head: ServedHead) -> None:
    session = "s:sample:0"
    await head.sampler(session)
    content = {
        "sampling_session_id": session,
        "prompt": {"chunks": [{"tokens": [5]}]},
        "sampling_params": {"max_tokens": 1},
    }

    async def number(**headers: str) -> int:
        body = orjson.dumps(content)
        answer = await head.send(routes.ASAMPLE, body, session, **headers)
        return int(answer.request_id.rpartition(":")[2])

    key: dict[str, str] = {routes.IDEMPOTENCY_HEADER: "a"}
    numbers = [await number(), await number(), await number(**key), await number(**key)]

    assert min(numbers) >= 2**62
    assert len(set(numbers)) == 3
    assert numbers[2] == numbers[3]


async def test_a_result_can_be_asked_for_without_waiting(head: ServedHead) -> None:
    await sent(head, routes.OPTIM_STEP, seq_id=2, **STEP)
    body = orjson.dumps({"request_id": f"{MODEL}:2"})

    pending = await head.send(routes.RETRIEVE_FUTURE, body, MODEL, **{routes.WAIT_HEADER: "0"})
    wrong = await head.send(routes.RETRIEVE_FUTURE, body, MODEL, **{routes.WAIT_HEADER: "soon"})

    assert pending.status == 408
    assert orjson.loads(pending.body)["type"] == "try_again"
    assert wrong.status == 400


def test_a_free_number_comes_after_all_that_run_or_wait() -> None:
    sequencer = Sequencer(max_queued_bytes=100, next_seq_id=0)
    assert sequencer.free_seq_id == 1
    sequencer.enqueue(0, b"create", 0)
    assert sequencer.take() == 0
    assert sequencer.free_seq_id == 1
    sequencer.finish()
    assert sequencer.free_seq_id == 1
    for number in (1, 5):
        sequencer.enqueue(number, b"", 0)
    assert sequencer.free_seq_id == 6
    sequencer.take()
    sequencer.skip_gap()
    assert sequencer.free_seq_id == 7
