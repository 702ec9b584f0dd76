"""The end of a run in a pool: its head saves a last checkpoint, and drops the model in any case."""

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tinkercloud_operator.decide.session.actions import GiveAway, RemoveModel, SaveRequest
from tinkercloud_operator.run.cluster.head_calls import HeadClient, SaveFailed, SaveResult
from tinkercloud_testing.cluster.kube_api.memory_api import Connection

SECRET = "/api/v1/namespaces/default/secrets/pool-a-token"
RUN = "one:train:0"
CHECKPOINT, MODEL = f"POST /checkpoint/{RUN}", f"DELETE /models/{RUN}"
SAVED = f"tinker://{RUN}/weights/last"


@dataclass
class Head:
    """A head whose store works or fails."""

    client: HeadClient
    url: str = ""
    is_failing: bool = False
    status: int = 503
    """The status of its failures."""
    words: str | None = "the store does not respond"
    is_slow: bool = False
    requests: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(f"{request.method} {request.path}")
        if self.is_slow:
            await asyncio.Event().wait()
        if self.is_failing and request.method == "POST":
            return web.json_response({"detail": self.words}, status=self.status)
        return web.json_response({"checkpoints": [SAVED]})

    async def remove(self, seconds: float) -> SaveResult:
        return await self.client.save("one", RemoveModel("pool-a", self.url, "h", RUN, seconds))


@pytest.fixture
async def head(connection: Connection) -> AsyncIterator[Head]:
    token = base64.b64encode(b"token").decode()
    connection.api.put(SECRET, {"data": {"token": token}})
    async with aiohttp.ClientSession() as http:
        made = Head(HeadClient(connection.cluster, http))
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", made.answer)
        async with TestServer(app) as server:
            made.url = str(server.make_url("")).rstrip("/")
            yield made


async def test_a_model_is_dropped_after_its_last_checkpoint(head: Head) -> None:
    assert await head.remove(60) == SaveResult(SAVED)
    assert head.requests == [CHECKPOINT, MODEL]


async def test_a_model_whose_checkpoint_fails_is_kept_while_there_is_time_to_try_again(
    head: Head,
) -> None:
    head.is_failing = True

    with pytest.raises(SaveFailed):
        await head.remove(60)
    assert head.requests == [CHECKPOINT]


async def test_a_model_whose_checkpoint_fails_until_the_end_is_dropped_without_one(
    head: Head,
) -> None:
    head.is_failing = True

    assert await head.remove(15) == SaveResult(None)
    assert head.requests == [CHECKPOINT, MODEL]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("the store does not respond", "the head answered 503: the store does not respond"),
        (None, "the head answered 503: Service Unavailable"),
    ],
)
async def test_a_failed_save_has_the_words_of_the_head(
    head: Head, words: str | None, message: str
) -> None:
    head.is_failing, head.words = True, words

    with pytest.raises(SaveFailed, match=f"^{message}$"):
        await head.client.save("pool-a", SaveRequest("suspend", head.url, "h", 60))


async def failure_to_give_away(head: Head) -> SaveFailed:
    """Return what a head answers that is to give a model away."""
    with pytest.raises(SaveFailed) as failure:
        await head.client.save("one", GiveAway("pool-a", head.url, "h", RUN, 0.5))
    return failure.value


@pytest.mark.parametrize("status", [400, 401, 421, 500, 503])
async def test_a_head_that_answers_with_an_error_has_not_given_its_model_away(
    status: int, head: Head
) -> None:
    head.is_failing, head.status = True, status

    failure = await failure_to_give_away(head)

    assert failure.is_refused
    assert str(failure) == f"the head answered {status}: the store does not respond"


@pytest.mark.parametrize("status", [502, 504, None])
async def test_a_head_without_an_answer_of_its_own_may_have_given_its_model_away(
    status: int | None, head: Head
) -> None:
    head.is_failing, head.status, head.is_slow = True, status or 0, status is None

    assert not (await failure_to_give_away(head)).is_refused


async def test_a_head_that_does_not_respond_is_named_as_the_cause(head: Head) -> None:
    head.is_slow = True

    with pytest.raises(SaveFailed, match="the head did not respond within 0 s"):
        await head.client.save("pool-a", SaveRequest("suspend", head.url, "h", 0.01))


async def test_a_model_is_dropped_if_there_is_no_time_to_save_it(head: Head) -> None:
    assert await head.remove(9) == SaveResult(None)
    assert head.requests[-1] == MODEL
