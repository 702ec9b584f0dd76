"""A queue measures how long a request waits because of its owner."""

import asyncio

import pytest

from tinkercloud_protocol.heads.launch import Timings
from tinkercloud_protocol.heads.owner_limits import OwnerLimits
from tinkercloud_protocol.wire.future_responses import Result, finished
from tinkercloud_protocol.wire.ids import ModelId
from tinkercloud_worker.head.order.kept_results import Results
from tinkercloud_worker.head.order.owner_pauses import OwnerPauses
from tinkercloud_worker.head.order.queue import ModelQueue
from tinkercloud_worker.head.order.queued_request import Operation
from tinkercloud_worker.head.wire.token_limits import TokenLimits


async def test_the_pause_of_a_request_is_its_own() -> None:
    limits, pauses = TokenLimits(lambda: 0.0), list[float]()
    results = Results(Timings(), 1 << 20, now=lambda: 0.0)
    queue = ModelQueue(
        ModelId("s", 0),
        results,
        owner="me",
        max_queued_bytes=1 << 20,
        gap_seconds=60,
        drop_gradient=lambda: asyncio.sleep(0),
        token_limits=limits,
    )
    queue.sequencer.next_seq_id = 1

    async def run() -> Result:
        pauses.append(queue.pauses.seconds_before())
        return finished({})

    def submit(seq_id: int) -> str:
        return queue.submit(seq_id, b"", 1, Operation(run, has_large_result=True))

    await results.wait(submit(1), seconds=60)
    limits.set(OwnerLimits(owner="me", tokens_per_minute=10))
    limits.spend("me", 20)
    second = submit(2)
    await asyncio.sleep(0)
    assert queue.is_throttled
    limits.set(OwnerLimits(owner="me"))
    queue.wake()
    await results.wait(second, seconds=60)
    await results.wait(submit(3), seconds=60)
    queue.close("the test is over")

    assert [pause > 0 for pause in pauses] == [False, True, False]


@pytest.mark.parametrize(
    ("noted", "seconds"),
    [
        ([False], 0),
        ([True, False], 1),
        ([True, True, True, False], 3),
        ([True, False, False], 0),
        ([True, False, True, False], 1),
    ],
)
def test_a_pause_lasts_from_when_it_is_noted_first(noted: list[bool], seconds: int) -> None:
    times = iter(range(9))
    pauses = OwnerPauses(lambda: float(next(times)))

    for is_paused in noted:
        pauses.note(is_paused=is_paused)

    assert pauses.seconds_before() == seconds
