"""The version of access rights is read after a request has arrived, once for many requests."""

import asyncio

import pytest

from tinkercloud_api.access import access_versions
from tinkercloud_api.access.access_versions import AccessVersions
from tinkercloud_protocol.wire.errors import Unavailable


class Source:
    """A catalog whose reads end when the test lets them."""

    def __init__(self) -> None:
        self.version = 1
        self.reads = 0
        self.gate = asyncio.Event()
        self.is_read = asyncio.Event()

    async def read(self) -> int:
        self.reads += 1
        seen = self.version
        self.is_read.set()
        await self.gate.wait()
        return seen


async def test_a_request_that_arrives_during_a_read_waits_for_the_next_one() -> None:
    source = Source()
    versions = AccessVersions(source.read, 10.0)
    early = asyncio.create_task(versions.current())
    await source.is_read.wait()
    source.version = 2
    late = [asyncio.create_task(versions.current()) for _ in range(100)]
    await asyncio.sleep(0)

    source.gate.set()

    assert await early == 1
    assert set(await asyncio.gather(*late)) == {2}
    assert source.reads == 2


async def test_a_request_that_is_cancelled_does_not_fail_the_others() -> None:
    source = Source()
    versions = AccessVersions(source.read, 10.0)
    first, second = (asyncio.create_task(versions.current()) for _ in range(2))
    await source.is_read.wait()

    first.cancel()
    source.gate.set()

    assert await second == 1


@pytest.mark.parametrize(("lenience", "is_answered"), [(3600.0, True), (-1.0, False)])
async def test_the_last_version_counts_for_a_while_if_the_catalog_does_not_respond(
    lenience: float, is_answered: bool
) -> None:
    answers = [_one, _fail]

    async def read() -> int:
        return await answers.pop(0)()

    versions = AccessVersions(read, lenience)
    assert await versions.current() == 1

    if is_answered:
        assert await versions.current() == 1
    else:
        with pytest.raises(Unavailable):
            await versions.current()


async def test_a_version_that_was_read_at_once_counts_while_the_catalog_does_not_respond() -> None:
    at_once: list[int | None] = [3, None]
    versions = AccessVersions(_fail, 3600.0, lambda: at_once.pop(0))

    assert [await versions.current(), await versions.current()] == [3, 3]


async def test_without_any_version_nothing_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_versions, "_READ_SECONDS", 0.0)
    with pytest.raises(Unavailable, match="send the request again"):
        await AccessVersions(Source().read, 3600.0).current()


async def _one() -> int:
    return 1


async def _fail() -> int:
    raise Unavailable("the catalog does not respond")
