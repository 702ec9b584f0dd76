"""Heads learn whose samples they report, and forget it, although calls to them fail."""

import asyncio
import json
from collections.abc import Sequence
from typing import cast

import pytest

from tinkercloud_api.catalog.runs.sample_texts import SampleTexts
from tinkercloud_api.heads import sampled_runs
from tinkercloud_api.heads.head_calls import HeadCalls
from tinkercloud_api.heads.sampled_runs import SampledRuns
from tinkercloud_api.providers.base import HeadEndpoint, SessionProvider
from tinkercloud_protocol.wire.errors import InvalidRequest, Unavailable, WireError

HEAD = HeadEndpoint("http://127.0.0.1:1", "token", "g1")


class World:
    """A head that fails some calls, and the runs whose samples are kept."""

    def __init__(self, *failures: WireError | None) -> None:
        self.runs: list[str] = []
        self.known: list[list[str]] = []
        self._failures = list(failures)

    def shared_heads(self) -> Sequence[HeadEndpoint]:
        return [HEAD]

    def heads_of(self, _owner: str) -> Sequence[HeadEndpoint]:
        return [HEAD]

    async def keeping(self) -> Sequence[tuple[str, str]]:
        return [(run, "ann") for run in self.runs]

    async def put(self, *arguments: object) -> None:
        failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            raise failure
        self.known.append(json.loads(str(arguments[2]))["runs"])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_runs, "_PERIOD_SECONDS", 0.001)


async def followed(world: World, number: int) -> None:
    """Follow until the head has answered so many calls, and then for some periods more."""
    runs = SampledRuns(
        cast("SampleTexts", world), cast("SessionProvider", world), cast("HeadCalls", world)
    )
    following = asyncio.create_task(runs.follow())
    while len(world.known) < number:  # noqa: ASYNC110 - the code under test has its own period
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    following.cancel()


async def test_a_head_of_an_earlier_server_forgets_the_runs_that_it_had(quick: None) -> None:
    world = World(Unavailable("busy"), Unavailable("busy"))

    await followed(world, 1)

    assert world.known == [[]]


async def test_a_head_that_missed_a_call_is_called_until_it_answers(quick: None) -> None:
    world = World(None, Unavailable("busy"))
    world.runs = ["r"]
    runs = asyncio.create_task(followed(world, 2))
    while not world.known:  # noqa: ASYNC110 - as in `followed`
        await asyncio.sleep(0.001)
    world.runs = []
    await runs

    assert world.known == [["r"], []]


async def test_a_head_of_an_earlier_version_is_called_once(quick: None) -> None:
    world = World(InvalidRequest("no such path"), None)
    world.runs = ["r"]
    runs = asyncio.create_task(followed(world, 1))
    await asyncio.sleep(0.05)
    assert world.known == []
    world.runs = []
    await runs

    assert world.known == [[]]
