"""Requests and results of one owner take no room from another owner."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
import pytest
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_protocol.heads.launch import Limits, ModelSpec, SamplerConfig, SamplerSpec
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.sampling_requests import parse_sample
from tinkercloud_protocol.wire import future_responses, routes
from tinkercloud_protocol.wire.envelope import peek_training
from tinkercloud_protocol.wire.errors import NotFound, Overloaded, ResultGone
from tinkercloud_protocol.wire.ids import ModelId, SamplingSessionId
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.bare_heads import Head, a_head
from tinkercloud_worker.head.order.requests import receive_batch, receive_json
from tinkercloud_worker.head.serve.service import HeadService

RESULT_BYTES = 4000
"""About as many a batch's and a sample's result below have. A batch is answered with two numbers of
four bytes for each target."""


@dataclass
class Owner:
    """One owner of what a shared head holds."""

    service: HeadService
    name: str
    last: dict[str, int] = field(default_factory=dict)

    async def model(self, index: int = 0) -> str:
        """Create a model."""
        model_id = ModelId(self.name, index)
        spec = ModelSpec(owner=self.name, lora=LoraConfig(rank=2, seed=1))
        await self.service.create_model(model_id, spec)
        await self.service.retrieve(f"{model_id}:0")
        return str(model_id)

    def sampler(self, index: int = 0) -> str:
        """Make a sampling session of the base model."""
        session = SamplingSessionId(self.name, index)
        self.service.register_sampler(session, SamplerSpec(owner=self.name))
        return str(session)

    def _next(self, target: str) -> int:
        self.last[target] = self.last.get(target, 0) + 1
        return self.last[target]

    def train(self, model: str, *, targets: int = 165, seq_id: int | None = None) -> str:
        """Send a batch, forward only, of three tokens; return the request's id."""
        message = pb.ForwardBackwardRequest(
            model_id=model,
            seq_id=seq_id or self._next(model),
            loss_fn="cross_entropy",
            forward_only=True,
        )
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([5, 6, 7], "<i4").tobytes()
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dtype = pb.DTYPE_INT64
        tensor.shape.extend((3, targets))
        tensor.sparse_csr.crow_indices = np.zeros(4, "<i8").tobytes()
        body = message.SerializeToString()
        return self.service.submit(receive_batch(body, peek_training(body)))

    def step(self, model: str) -> str:
        """Send an optim_step; return the request's id."""
        body = {"model_id": model, "seq_id": self._next(model), "adam_params": {}}
        return self.service.submit(receive_json(routes.OPTIM_STEP, orjson.dumps(body)))

    def save(self, model: str, name: str) -> str:
        """Send a save; return the request's id."""
        body = {"model_id": model, "seq_id": self._next(model), "path": name}
        return self.service.submit(receive_json(routes.SAVE_WEIGHTS, orjson.dumps(body)))

    def sample(self, session: str, *, alternatives: int = 120, max_tokens: int = 1) -> str:
        """Send a sampling request; return the request's id."""
        body = {
            "sampling_session_id": session,
            "seq_id": self._next(session),
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7, 8]}]},
            "sampling_params": {"max_tokens": max_tokens, "stop": []},
            "topk_prompt_logprobs": alternatives,
        }
        prepared = self.service.samples.prepare(parse_sample(orjson.dumps(body)))
        return str(self.service.sample(prepared))


@dataclass
class Shared:
    """A head that two owners share."""

    head: Head
    eve: Owner
    bob: Owner

    @property
    def service(self) -> HeadService:
        return self.head.service

    async def is_idle(self) -> None:
        """Wait until nothing waits or runs."""

        def is_so() -> bool:
            return self.service.status().pending_requests == 0

        await asyncio.to_thread(wait_until, is_so, "all requests are run")

    async def read(self, request_id: str) -> future_responses.Result:
        result = await self.service.retrieve(request_id)
        assert result is not None
        return result

    async def is_there(self, request_id: str) -> bool:
        """Read a result; return whether it was still there and no failure."""
        try:
            result = await self.read(request_id)
        except (ResultGone, NotFound):
            return False
        return result.content_type == future_responses.PROTOBUF


@contextmanager
def a_shared_head(
    folder: Path, limits: Limits, sampler: SamplerConfig | None = None
) -> Iterator[Shared]:
    with a_head(folder.as_uri(), folder, "g1", limits=limits, sampler=sampler) as head:
        yield Shared(head, Owner(head.service, "eve"), Owner(head.service, "bob"))


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Shared]:
    """A head whose owners have room for two large results each."""
    with a_shared_head(tmp_path, Limits(max_result_bytes=2 * RESULT_BYTES + 1000)) as shared:
        yield shared


async def test_unread_samples_of_one_owner_do_not_prevent_another_from_sampling(
    shared: Shared,
) -> None:
    left, session = shared.eve.sampler(), shared.bob.sampler()
    for _ in range(5):
        shared.eve.sample(left)
    await shared.is_idle()

    drawn = [shared.bob.sample(session) for _ in range(2)]
    await shared.is_idle()

    assert [await shared.is_there(request_id) for request_id in drawn] == [True, True]


async def test_the_oldest_unread_samples_are_evicted_first_and_can_be_sampled_again(
    shared: Shared,
) -> None:
    session = shared.eve.sampler()
    drawn = []
    for _ in range(4):
        drawn.append(shared.eve.sample(session))
        await shared.is_idle()

    assert [await shared.is_there(request_id) for request_id in drawn] == [False, False, True, True]
    with pytest.raises(ResultGone) as caught:
        await shared.read(drawn[0])
    assert "owner 'eve'" in caught.value.message
    assert drawn[0] in caught.value.message
    assert await shared.is_there(shared.eve.sample(session))


async def test_a_sample_larger_than_the_budget_is_kept_until_the_next(
    shared: Shared,
) -> None:
    session = shared.eve.sampler()
    large = shared.eve.sample(session, alternatives=1024)
    await shared.is_idle()
    assert await shared.is_there(large)


async def test_unread_training_results_are_kept_and_their_owner_waits_with_a_reason(
    shared: Shared,
) -> None:
    model, other = await shared.eve.model(0), await shared.eve.model(1)
    left = [shared.eve.train(model) for _ in range(3)]
    await shared.is_idle()

    with pytest.raises(Overloaded) as caught:
        shared.eve.train(other)
    message = caught.value.message
    assert "3 results" in message
    assert "owner 'eve'" in message
    assert model in message
    assert "limits.max_result_bytes is 9000" in message
    for request_id in left:
        assert await shared.is_there(request_id)
    shared.eve.last[other] = 0
    assert await shared.is_there(shared.eve.train(other))


async def test_unread_training_results_of_one_owner_do_not_affect_another(
    shared: Shared,
) -> None:
    model = await shared.eve.model()
    for _ in range(3):
        shared.eve.train(model)
    await shared.is_idle()

    theirs, session = await shared.bob.model(), shared.bob.sampler()
    requests = [shared.bob.train(theirs), shared.bob.sample(session)]

    assert [await shared.is_there(request_id) for request_id in requests] == [True, True]
    assert b"error" not in (await shared.read(shared.bob.save(theirs, "x"))).body


async def test_an_owner_whose_results_are_unread_can_still_step_save_and_sample(
    shared: Shared,
) -> None:
    model, other = await shared.eve.model(0), await shared.eve.model(1)
    session = shared.eve.sampler()
    for _ in range(3):
        shared.eve.train(model)
    await shared.is_idle()

    for request_id in (shared.eve.step(other), shared.eve.save(other, "x")):
        assert b"error" not in (await shared.read(request_id)).body
    for _ in range(3):
        assert await shared.is_there(shared.eve.sample(session))


async def test_accepted_batches_are_on_hold_until_results_are_read(
    shared: Shared,
) -> None:
    model = await shared.eve.model()
    sent = [shared.eve.train(model, seq_id=seq_id) for seq_id in (5, 4, 3, 2, 1)]
    held = f"{model}:4"

    def is_held() -> bool:
        return shared.service.why_waiting(held)[0] == "paused_rate_limit"

    await asyncio.to_thread(wait_until, is_held, "the fourth batch is held back")
    assert shared.service.status().pending_requests == 2
    state, reason = shared.service.why_waiting(f"{model}:5")
    assert state == "paused_rate_limit"
    assert reason is not None
    assert f"request {held} is paused: the unread training results of owner 'eve'" in reason
    assert "(3 results; " in reason

    assert [await shared.is_there(request_id) for request_id in sent[::-1]] == [True] * 5


@pytest.mark.parametrize("ends", ["the run", "the sampler"])
async def test_results_of_a_deleted_session_take_no_room(shared: Shared, ends: str) -> None:
    model, session = await shared.eve.model(), shared.eve.sampler()
    for _ in range(3):
        shared.eve.train(model)
    shared.eve.sample(session)
    await shared.is_idle()
    other = await shared.eve.model(1)

    if ends == "the run":
        await shared.service.delete_model(ModelId.parse(model))
        assert await shared.is_there(shared.eve.train(other))
    else:
        await shared.service.retire_sampler(SamplingSessionId.parse(session))
        with pytest.raises(Overloaded):
            shared.eve.train(other)


async def test_a_head_can_be_suspended_while_batches_are_on_hold(
    shared: Shared, tmp_path: Path
) -> None:
    model = await shared.eve.model()
    for seq_id in (5, 4, 3, 2, 1):
        shared.eve.train(model, seq_id=seq_id)
    await shared.service.suspend()
    shared.service.results.release()

    limits = Limits(max_result_bytes=9000)
    with a_head(tmp_path.as_uri(), tmp_path, "g2", limits=limits) as head:
        spec = ModelSpec(owner="eve", lora=LoraConfig(rank=2, seed=1), resume_generation="g1")
        await head.service.create_model(ModelId.parse(model), spec)
        for seq_id in range(1, 6):
            result = await head.service.retrieve(f"{model}:{seq_id}")
            assert result is not None
            assert result.content_type == future_responses.PROTOBUF, result.body


async def test_a_model_with_batches_on_hold_can_be_suspended_and_frees_its_room(
    shared: Shared,
) -> None:
    model, other = await shared.eve.model(0), await shared.eve.model(1)
    sent = [shared.eve.train(model, seq_id=seq_id) for seq_id in (5, 4, 3, 2, 1)]

    def is_held() -> bool:
        return shared.service.why_waiting(f"{model}:4")[0] == "paused_rate_limit"

    await asyncio.to_thread(wait_until, is_held, "the fourth batch is held back")
    with pytest.raises(Overloaded):
        shared.eve.train(other, seq_id=1)

    assert await shared.service.suspend_model(ModelId.parse(model))

    assert await shared.is_there(shared.eve.train(other, seq_id=1))
    await shared.service.recall(model)
    assert [await shared.is_there(request_id) for request_id in sent[::-1]] == [True] * 5


def slowly(owner: Owner, session: str) -> Callable[[], str]:
    return lambda: owner.sample(session, alternatives=0, max_tokens=400)


async def test_queued_samples_of_one_owner_do_not_prevent_another_from_sampling(
    tmp_path: Path,
) -> None:
    limits, room = Limits(), SamplerConfig(max_queued_requests=2)
    with a_shared_head(tmp_path, limits, room) as shared:
        send, theirs = slowly(shared.eve, shared.eve.sampler()), shared.bob.sampler()
        waiting = [send() for _ in range(2)]

        with pytest.raises(
            Overloaded, match="2 sampling requests of owner 'eve' are already queued"
        ):
            send()
        state, reason = shared.service.why_waiting(waiting[1])
        assert state == "paused_rate_limit"
        assert reason is not None
        assert "owner 'eve'" in reason
        sent = shared.bob.sample(theirs, alternatives=0)
        assert shared.service.why_waiting(sent)[0] == "active"

        assert await shared.is_there(sent)


async def test_queued_requests_of_one_owner_do_not_prevent_another_from_training(
    tmp_path: Path,
) -> None:
    with a_shared_head(tmp_path, Limits(max_queued_bytes=10_000)) as shared:
        first, second = await shared.eve.model(0), await shared.eve.model(1)
        theirs = await shared.bob.model()
        shared.eve.train(first, seq_id=3)
        shared.eve.train(first, seq_id=2)

        with pytest.raises(Overloaded, match="0 bytes of requests are queued for this model"):
            shared.eve.train(second, seq_id=2)
        shared.bob.train(theirs, seq_id=2)
        waits = shared.service.why_waiting(f"{theirs}:2")
        assert waits[1] is not None
        assert f"{theirs}:1, which has not arrived" in waits[1]

        assert await shared.is_there(shared.eve.train(second, seq_id=1))
        assert await shared.is_there(shared.bob.train(theirs, seq_id=1))
        assert await shared.is_there(f"{theirs}:2")


async def test_an_owner_can_have_as_many_models_as_the_limit_allows(tmp_path: Path) -> None:
    with a_shared_head(tmp_path, Limits(max_models_per_owner=2)) as shared:
        first, _ = await shared.eve.model(0), await shared.eve.model(1)
        refused = await shared.eve.model(2)
        failure = orjson.loads((await shared.read(f"{refused}:0")).body)

        assert "owner 'eve' already has 2 models here" in failure["error"]
        assert "limits.max_models_per_owner is 2" in failure["error"]
        assert b"error" not in (await shared.read(f"{await shared.bob.model()}:0")).body
        await shared.service.delete_model(ModelId.parse(first))
        assert b"error" not in (await shared.read(f"{await shared.eve.model(3)}:0")).body
