"""The informer: a copy of all objects of a kind that survives interruptions."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tinkercloud_kube import informer as module
from tinkercloud_kube.client import Client, Event, Page
from tinkercloud_kube.errors import Expired, Unavailable
from tinkercloud_kube.informer import Informer
from tinkercloud_testing.cluster.kube_api.memory_api import Connection
from tinkercloud_testing.harness.waiting import reached


def stored(name: str, version: int, uid: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": uid or name, "resourceVersion": str(version)}}


def keep(manifest: Any) -> str | None:
    """Keep the resource version; leave out objects of a later version of the program."""
    name, version = manifest["metadata"]["name"], manifest["metadata"]["resourceVersion"]
    return None if name == "of-a-later-version" else str(version)


class Scripted(Client):
    """A client whose lists and watches return what a test says, one after the other."""

    def __init__(self, connection: Connection, *lists: Page | Exception) -> None:
        super().__init__(connection.client, "default", manager="a test")
        self.lists = list(lists)
        self.watches: list[int] = []
        """Resource versions that watches started from."""
        self.events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        """Events; None ends a watch."""

    async def list_all(self, kind: str) -> Page:
        result = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        if isinstance(result, Exception):
            raise result
        return result

    async def watch(self, kind: str, version: int, seconds: int) -> AsyncGenerator[Event, None]:
        self.watches.append(version)
        while (event := await self.events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_SECONDS", 0.01)


@asynccontextmanager
async def running(client: Client, gone: list[str] | None = None) -> AsyncIterator[Informer[str]]:
    on_gone = (gone if gone is not None else []).append
    informer = Informer(client, "TrainingSession", keep, on_gone)
    task = asyncio.create_task(informer.run())
    async with asyncio.timeout(10):
        await informer.is_filled.wait()
        yield informer
    task.cancel()
    await asyncio.wait({task})


async def test_an_informer_follows_additions_changes_and_deletions(connection: Connection) -> None:
    client, gone = Scripted(connection, Page([stored("a", 1)], 3)), list[str]()

    async with running(client, gone) as informer:
        assert informer.get("a") == "1"
        client.events.put_nowait(Event("ADDED", stored("b", 4)))
        client.events.put_nowait(Event("MODIFIED", stored("a", 5)))
        client.events.put_nowait(Event("DELETED", stored("b", 6)))
        assert await reached(lambda: gone == ["b"])

        assert list(informer.objects()) == ["5"]
        assert informer.get("b") is None


async def test_a_watch_continues_where_the_one_before_it_ended(connection: Connection) -> None:
    client = Scripted(connection, Page([], 3))

    async with running(client):
        client.events.put_nowait(Event("ADDED", stored("a", 4)))
        client.events.put_nowait(Event("BOOKMARK", {"metadata": {"resourceVersion": "9"}}))
        client.events.put_nowait(None)
        assert await reached(lambda: len(client.watches) == 2)

    assert client.watches == [3, 9]


async def test_a_broken_watch_is_resumed_and_the_copy_stays(connection: Connection) -> None:
    client = Scripted(connection, Page([stored("a", 1)], 3))

    async with running(client) as informer:
        client.events.put_nowait(Unavailable("the connection broke"))
        assert await reached(lambda: len(client.watches) == 2)

        assert informer.get("a") == "1"
    assert client.watches == [3, 3]


async def test_an_expired_watch_lists_again_and_finds_what_was_deleted(
    connection: Connection,
) -> None:
    client = Scripted(
        connection, Page([stored("a", 1), stored("b", 2)], 3), Page([stored("b", 2)], 8)
    )
    gone: list[str] = []

    async with running(client, gone) as informer:
        client.events.put_nowait(Expired("too old"))
        assert await reached(lambda: len(client.watches) == 2)

        assert gone == ["a"]
        assert list(informer.objects()) == ["2"]
    assert client.watches == [3, 8]


async def test_a_list_that_fails_is_tried_again(connection: Connection) -> None:
    client = Scripted(connection, Unavailable("starting"), Page([stored("a", 1)], 3))

    async with running(client) as informer:
        assert informer.get("a") == "1"


async def test_a_cluster_restored_from_a_backup_replaces_the_copy(connection: Connection) -> None:
    client = Scripted(
        connection, Page([stored("a", 70), stored("b", 80)], 90), Page([stored("a", 5)], 6)
    )
    gone: list[str] = []

    async with running(client, gone) as informer:
        client.events.put_nowait(Expired("too large"))
        assert await reached(lambda: len(client.watches) == 2)

        assert (informer.get("a"), informer.get("b")) == ("5", None)
        assert gone == ["a", "b"]


async def test_an_event_that_cannot_be_read_lists_again(connection: Connection) -> None:
    client = Scripted(connection, Page([], 3), Page([stored("a", 4)], 5))

    async with running(client) as informer:
        client.events.put_nowait(Event("ADDED", {"metadata": {}}))

        assert await reached(lambda: informer.get("a") == "4")


async def test_an_unreadable_object_does_not_hide_others(connection: Connection) -> None:
    client = Scripted(connection, Page([stored("of-a-later-version", 1), stored("readable", 2)], 3))

    async with running(client) as informer:
        assert informer.get("readable") == "2"
        assert informer.get("of-a-later-version") is None


async def test_an_object_that_no_longer_exists_is_announced_once(connection: Connection) -> None:
    client, gone = Scripted(connection, Page([stored("a", 1)], 3)), list[str]()

    async with running(client, gone) as informer:
        informer.forget("a")
        informer.forget("a")
        client.events.put_nowait(Event("DELETED", stored("a", 4)))
        client.events.put_nowait(Event("ADDED", stored("b", 5)))
        assert await reached(lambda: informer.get("b") is not None)

        assert gone == ["a"]


async def test_waiting_for_a_change_ends_when_the_object_differs(connection: Connection) -> None:
    client = Scripted(connection, Page([stored("a", 1)], 3))

    async with running(client) as informer:
        waiting = asyncio.create_task(informer.changed("a", informer.get("a")))
        client.events.put_nowait(Event("MODIFIED", stored("b", 4)))
        assert await reached(lambda: informer.get("b") is not None)
        assert not waiting.done()

        client.events.put_nowait(Event("MODIFIED", stored("a", 5)))
        await waiting

        await informer.changed("a", None)


async def test_a_change_of_any_object_ends_a_wait_for_any(connection: Connection) -> None:
    client = Scripted(connection, Page([stored("a", 1)], 3))

    async with running(client) as informer:
        waiting = asyncio.create_task(informer.any_change())
        client.events.put_nowait(Event("MODIFIED", stored("b", 4)))
        await waiting


class WithoutPast(Scripted):
    """A client whose watches never start, whatever was listed just before."""

    listed = 0

    async def list_all(self, kind: str) -> Page:
        self.listed += 1
        return await super().list_all(kind)

    async def watch(self, kind: str, version: int, seconds: int) -> AsyncGenerator[Event, None]:
        raise Expired(f"{kind}: too old resource version: {version}")
        yield


async def test_lists_of_a_cluster_whose_watches_expire_at_once_are_spaced_out(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_SECONDS", 0.5)
    client = WithoutPast(connection, Page([], 3))

    async with running(client):
        await asyncio.sleep(0.5)

    assert 1 <= client.listed <= 3
