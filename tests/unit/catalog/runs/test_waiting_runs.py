"""Runs that wait for a limit start when another run ends, on whichever server, or falls silent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from sqlalchemy import update

from tinkercloud_api.access.owner_tenants import Tenants
from tinkercloud_api.catalog.runs import run_ends
from tinkercloud_api.catalog.runs.admission import RunQuotas
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import Session, TrainingRun, now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.heads import run_admission
from tinkercloud_api.heads.activity import Activity
from tinkercloud_api.heads.run_admission import RunAdmission
from tinkercloud_crds.quota_fields import Tenant
from tinkercloud_crds.tenant import TenantLimits, TenantSpec
from tinkercloud_testing.harness.waiting import reached
from tinkercloud_testing.storage.postgresql import PostgreSQL

ONE_MODEL = [
    Tenant("research", TenantSpec(owners=["ada"], limits=TenantLimits(models=1))),
]
SILENCE = timedelta(minutes=10)


class Server:
    """What a server has to admit runs, with its own connections to the catalog."""

    def __init__(self, url: str) -> None:
        self.engine = open_database(url)
        self.catalog = Catalog(self.engine)
        self.activity, self.has_written = Activity(self.catalog), asyncio.Event()
        self.quotas, tenants = RunQuotas(self.engine), Tenants(lambda: ONE_MODEL)
        self.admission = RunAdmission(self.quotas, tenants, SILENCE, self._write)

    async def _write(self) -> None:
        await self.activity.write()
        self.has_written.set()

    async def make(self, name: str) -> str:
        """Record a run, and return its id."""
        session = Session(id=name, owner="ada", sdk_version="1", tags=[], user_metadata={})
        await self.catalog.add_session(session)
        run = TrainingRun(
            id=f"{name}:train:0", session_id=name, owner="ada", base_model="tiny", spec={}
        )
        return (await self.catalog.add_run(run)).id

    async def has_been_silent(self, name: str, almost: timedelta) -> None:
        """Move a client's last activity into the past, until it is almost inactive."""
        moment = now() - SILENCE + almost
        async with self.engine.begin() as db:
            await db.execute(update(Session).values(last_heartbeat_at=moment).filter_by(id=name))
            of_session = update(TrainingRun).filter_by(session_id=name)
            await db.execute(of_session.values(last_request_at=moment))


@asynccontextmanager
async def running(url: str, number: int) -> AsyncIterator[list[Server]]:
    """Open servers that share an empty catalog."""
    found = [Server(url) for _ in range(number)]
    await migrate(found[0].engine)
    try:
        yield found
    finally:
        for server in found:
            await server.engine.dispose()


class Network:
    """Forwards connections to PostgreSQL, until they die without notice."""

    def __init__(self, target: PostgreSQL) -> None:
        self._target = target
        self._forwarding: set[asyncio.Task[None]] = set()
        self._open: list[asyncio.StreamWriter] = []
        self.port = 0

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a new connection."""
        far = await asyncio.open_connection(self._target.address, self._target.port)
        self._open += [writer, far[1]]
        for source, sink in ((reader, far[1]), (far[0], writer)):
            self._forwarding.add(asyncio.create_task(self._forward(source, sink)))

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while content := await source.read(1 << 16):
            sink.write(content)
        sink.close()

    def lose_all(self) -> None:
        """Forward nothing more of the connections that there are."""
        for task in self._forwarding:
            task.cancel()
        self._forwarding.clear()

    def close(self) -> None:
        """Close everything."""
        self.lose_all()
        for writer in self._open:
            writer.close()


@asynccontextmanager
async def a_network(target: PostgreSQL) -> AsyncIterator[Network]:
    """Listen on a port of this machine, and forward its connections."""
    network = Network(target)
    listening = await asyncio.start_server(network.connect, "127.0.0.1", 0)
    network.port = listening.sockets[0].getsockname()[1]
    try:
        yield network
    finally:
        network.close()
        listening.close()


@pytest.fixture
async def server(database_url: str) -> AsyncIterator[Server]:
    async with running(database_url, 1) as [only]:
        yield only


async def waiting(server: Server, run_id: str) -> "asyncio.Task[None]":
    """Let a run wait for its limit."""
    task = asyncio.create_task(server.admission.wait(run_id))
    await reached(lambda: server.admission.why_waiting(run_id) is not None)
    return task


async def test_a_run_starts_when_one_is_deleted_on_another_server(database_url: str) -> None:
    async with running(database_url, 2) as [own, other]:
        following = asyncio.create_task(own.admission.follow())
        running_one = await own.make("first")
        await own.admission.wait(running_one)

        for name in ("second", "third"):
            next_one = await own.make(name)
            task = await waiting(own, next_one)
            await other.catalog.delete_run(running_one)
            await asyncio.wait_for(task, 60)
            running_one = next_one

        following.cancel()


async def test_a_run_starts_although_the_message_of_the_end_of_another_was_lost(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_admission, "_LONGEST_WAIT_SECONDS", 0.1)
    async with running(database_url, 2) as [own, other]:
        first, second = await own.make("first"), await own.make("second")
        await own.admission.wait(first)
        task = await waiting(own, second)

        await other.catalog.delete_run(first)

        await asyncio.wait_for(task, 60)


async def test_the_ends_of_runs_are_followed_again_after_a_connection_has_died_silently(
    postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_RETRY_SECONDS", "_CHECK_SECONDS"):
        monkeypatch.setattr(run_ends, name, 0.1)
    monkeypatch.setattr(run_ends, "_RESPONSE_SECONDS", 2.0)
    url = postgresql.new_database()
    async with a_network(postgresql) as network, running(url, 1) as [other]:
        own = open_database(url.replace(f":{postgresql.port}/", f":{network.port}/"))
        ends: asyncio.Queue[None] = asyncio.Queue()
        following = asyncio.create_task(
            run_ends.follow(own, lambda: ends.put_nowait(None), asyncio.Event())
        )
        await asyncio.wait_for(ends.get(), 60)

        network.lose_all()
        # It is called as soon as it follows again.
        await asyncio.wait_for(ends.get(), 60)
        await other.catalog.delete_run(await other.make("first"))
        await asyncio.wait_for(ends.get(), 60)

        following.cancel()
        await own.dispose()


async def test_a_run_starts_when_the_client_of_another_becomes_inactive(
    server: Server,
) -> None:
    first, second = await server.make("first"), await server.make("second")
    await server.admission.wait(first)
    await server.has_been_silent("first", almost=timedelta(seconds=0.5))

    await asyncio.wait_for(await waiting(server, second), 60)


async def test_a_client_that_was_heard_since_the_catalog_was_written_keeps_its_place(
    server: Server,
) -> None:
    first, second = await server.make("first"), await server.make("second")
    await server.admission.wait(first)
    await server.has_been_silent("first", almost=timedelta(seconds=0.5))
    server.activity.record_heartbeat("first")
    task = await waiting(server, second)

    await asyncio.wait_for(server.has_written.wait(), 60)

    assert await server.quotas.admit(second, ONE_MODEL, now() - SILENCE) is not None
    task.cancel()
