"""Reports of a head on its lease: all of them to every server, the last one when it stops."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tinkercloud_api.providers.base import HeadEndpoint, HeadReport
from tinkercloud_api.providers.head_lease import hold_lease
from tinkercloud_protocol.heads.durability_settings import DurabilityReport
from tinkercloud_protocol.heads.reports.usage_reports import UsageReport
from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_testing.serving.served_heads import TOKEN, ServedHead, a_served_head
from tinkercloud_worker.engine.turns.usage_counts import Payer, Usage
from tinkercloud_worker.head.serve.lease_reports import lease_reports

pytestmark = pytest.mark.timeout(120)


class Recorder:
    """Records the trained tokens of reports by model; fails for the first ones."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = list(failures)
        self.tokens: dict[str, int] = {}
        self.generations: set[str] = set()
        self.states: list[DurabilityReport] = []
        self.has_failed = asyncio.Event()
        self._changed = asyncio.Event()

    async def __call__(self, report: HeadReport) -> None:
        if self._failures:
            self.has_failed.set()
            raise self._failures.pop()
        assert isinstance(report, UsageReport)
        self.generations.add(report.generation)
        self.tokens |= {entry.model_id: entry.trained_tokens for entry in report.entries}
        self._changed.set()

    async def wait_for(self, tokens: dict[str, int]) -> None:
        while self.tokens != tokens:
            self._changed.clear()
            await self._changed.wait()


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[ServedHead]:
    async with a_served_head(tmp_path) as served:
        yield served


def train(head: ServedHead, session: str, tokens: int) -> None:
    """Count a request."""
    model = f"{session}:train:0"
    head.backend.usage.count(Payer.of_model("me", model), Usage(trained_tokens=tokens))


def hold(head: ServedHead, recorder: Recorder) -> asyncio.Task[None]:
    endpoint = HeadEndpoint(head.url, TOKEN, "g1")
    return asyncio.create_task(hold_lease(head.client, endpoint, recorder, recorder.states.append))


async def test_each_server_receives_everything_first_and_changes_later(head: ServedHead) -> None:
    early, late = Recorder(), Recorder()
    train(head, "a", 3)
    leases = [hold(head, early)]
    await early.wait_for({"a:train:0": 3})
    train(head, "a", 1)
    train(head, "b", 5)
    await early.wait_for({"a:train:0": 4, "b:train:0": 5})

    leases.append(hold(head, late))
    await late.wait_for({"a:train:0": 4, "b:train:0": 5})
    train(head, "b", 1)

    for recorder in (early, late):
        await recorder.wait_for({"a:train:0": 4, "b:train:0": 6})
    assert late.generations == {"g1"}
    for lease in leases:
        lease.cancel()


async def test_a_stopping_head_reports_what_it_has_not_reported_and_ends_the_lease(
    head: ServedHead,
) -> None:
    recorder = Recorder()
    lease = hold(head, recorder)
    train(head, "a", 3)
    await recorder.wait_for({"a:train:0": 3})

    for session in range(250):
        train(head, f"s{session}", 2)
    head.lifecycle.begin_stop()
    await lease

    assert recorder.tokens == {"a:train:0": 3} | {f"s{n}:train:0": 2 for n in range(250)}


async def test_what_is_counted_while_a_report_is_sent_is_in_the_last_one(head: ServedHead) -> None:
    drained = asyncio.Event()
    reports = lease_reports(head.backend, head.lifecycle.service.durability, drained)
    train(head, "a", 3)
    assert DurabilityReport.model_validate_json(await anext(reports)).models == {}
    await anext(reports)

    train(head, "a", 1)
    drained.set()
    await asyncio.sleep(0)
    [last] = [UsageReport.model_validate_json(line) async for line in reports]

    assert [entry.trained_tokens for entry in last.entries] == [4]


async def test_a_report_that_the_catalog_does_not_accept_is_recorded_later(
    head: ServedHead,
) -> None:
    recorder = Recorder(Unavailable("the catalog does not respond"))
    train(head, "a", 3)
    lease = hold(head, recorder)
    await recorder.has_failed.wait()

    head.lifecycle.begin_stop()
    await lease

    assert recorder.tokens == {"a:train:0": 3}


async def test_a_report_that_can_never_be_recorded_does_not_end_the_lease(
    head: ServedHead,
) -> None:
    recorder = Recorder(ValueError("bad"))
    train(head, "a", 3)
    lease = hold(head, recorder)
    await recorder.has_failed.wait()
    train(head, "a", 1)

    await recorder.wait_for({"a:train:0": 4})
    lease.cancel()


async def test_a_lease_needs_the_token_of_the_head(head: ServedHead) -> None:
    endpoint = HeadEndpoint(head.url, "another", "g1")

    with pytest.raises(aiohttp.ClientError, match="401"):
        await hold_lease(head.client, endpoint, Recorder(), lambda _: None)
