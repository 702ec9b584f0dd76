"""A request only affects the model it was routed and authorized by, whatever its body says."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import orjson
import pytest
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_protocol.heads.launch import Limits, ModelSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.serving.served_heads import ServedHead, a_served_head

MINE, THEIRS = "mine:train:0", "theirs:train:0"
MAX_BODY_BYTES = 100_000


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[ServedHead]:
    async with a_served_head(tmp_path, Limits(max_body_bytes=MAX_BODY_BYTES)) as head:
        for model_id, owner in ((MINE, "me"), (THEIRS, "somebody else")):
            await head.begin(model_id, ModelSpec(owner=owner, lora=LoraConfig(rank=2, seed=1)))
        yield head


def a_batch(model_id: str, seq_id: int) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([5, 6, 7], "<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array([6, 7, 8], "<i8").tobytes(), pb.DTYPE_INT64
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("added", "named"),
    [
        (pb.ForwardBackwardRequest(model_id=THEIRS), f"{THEIRS!r} and 1"),
        (pb.ForwardBackwardRequest(seq_id=2), f"{MINE!r} and 2"),
        (pb.ForwardBackwardRequest(model_id=THEIRS, seq_id=1), f"{THEIRS!r} and 1"),
    ],
)
async def test_a_batch_with_two_ids_fails_under_the_first_and_never_reaches_the_second(
    head: ServedHead, added: pb.ForwardBackwardRequest, named: str
) -> None:
    body = a_batch(MINE, 1) + added.SerializeToString()

    answer = await head.send(routes.FORWARD_BACKWARD, body, MINE)

    assert answer.request_id == f"{MINE}:1"
    assert f"then {named}; send each field once" in await head.failure(answer.request_id)
    assert head.lifecycle.service.status().pending_requests == 0
    assert (await head.result(f"{THEIRS}:1")).status == 404
    assert (await head.result(f"{MINE}:2")).status == 404


async def test_a_batch_that_repeats_the_same_id_is_accepted(head: ServedHead) -> None:
    again = pb.ForwardBackwardRequest(model_id=MINE, seq_id=1).SerializeToString()

    answer = await head.send(routes.FORWARD_BACKWARD, a_batch(MINE, 1) + again, MINE)

    outcome = await head.result(answer.request_id)
    assert pb.ForwardBackwardOutput.FromString(outcome.body).metrics["loss:sum"] > 0


async def test_an_oversized_batch_is_not_queued_in_a_model_it_was_not_routed_to(
    head: ServedHead,
) -> None:
    body = a_batch(THEIRS, 1) + b"\0" * MAX_BODY_BYTES

    assert (await head.send(routes.FORWARD_BACKWARD, body, MINE)).status == 413
    assert (await head.result(f"{THEIRS}:1")).status == 404


@pytest.mark.parametrize("rest", [b"", b',"adam_params":{"learning_rate":"fast"}'])
async def test_a_json_request_with_two_model_ids_is_rejected(head: ServedHead, rest: bytes) -> None:
    for first, last in ((MINE, THEIRS), (THEIRS, MINE)):
        names = b'"model_id":%b,"model_id":%b' % (orjson.dumps(first), orjson.dumps(last))
        body = b'{"seq_id":1,%b%b}' % (names, rest)

        answer = await head.send(routes.OPTIM_STEP, body, first)

        assert answer.status == 400
        assert "was routed to" in answer.detail
        assert (await head.result(f"{last}:1")).status == 404
