"""A run that no head has in memory is suspended already."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tinkercloud_api.heads.run_states import Whereabouts
from tinkercloud_api.routes.sessions.run_state_routes import StopRun, stop_run
from tinkercloud_api.runs.run_control import Runs
from tinkercloud_protocol.responses.run_states import RunState
from tinkercloud_protocol.wire.errors import NotFound

RUN = "9f0f6c6a-5c5e-4d0c-8a51-6f3f3f8f8a10:train:0"


class Server:
    """What the route uses of a server; asking for a head fails."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.runs = Runs(cast("Any", self), cast("Any", SimpleNamespace(catalog=self)))
        self.locator = self.known = self

    async def authorize_run(self, run_id: str, caller: object) -> None:
        """Allow everything."""

    async def run(self, run_id: str) -> str:
        return run_id

    async def of(self, rows: list[str]) -> list[Whereabouts]:
        return [Whereabouts(self.state) for _ in rows]

    async def head_of_run(self, run_id: str) -> None:
        raise NotFound("a head was asked for")


async def suspend(state: RunState) -> tuple[str, set[str]]:
    caller = SimpleNamespace(named_objects=set())
    server = cast("Any", Server(state))
    answer = await stop_run(RUN, StopRun(suspend=True), server, cast("Any", caller))
    return answer.state, caller.named_objects


@pytest.mark.parametrize("state", ["suspended", "on disk"])
async def test_no_head_is_asked_for_a_run_that_is_suspended_or_on_disk(state: RunState) -> None:
    assert await suspend(state) == ("suspended", {"suspended"})


async def test_the_head_of_a_run_that_lives_suspends_it() -> None:
    with pytest.raises(NotFound, match="a head was asked for"):
        await suspend("live")
