"""Runs under the limits of their tenant, admitted by several replicas at the same time."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from tinkercloud_api.catalog.runs.admission import RunQuotas, Waiting
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.tables import STORED, Session, TrainingRun
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_crds.quota_fields import Tenant, usage
from tinkercloud_crds.tenant import TenantLimits, TenantSpec

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ALWAYS = datetime(2000, 1, 1, tzinfo=UTC)


def a_tenant(models: int, *owners: str) -> Tenant:
    spec = TenantSpec(owners=list(owners or ("ada",)), limits=TenantLimits(models=models))
    return Tenant("research", spec)


class Replicas:
    """Servers with the same catalog, each with its own connections."""

    def __init__(self, url: str) -> None:
        self._engines = [open_database(url) for _ in range(2)]
        self.catalog = Catalog(self._engines[0])
        self.quotas = [RunQuotas(engine) for engine in self._engines]

    async def open(self) -> None:
        await migrate(self._engines[0])

    async def close(self) -> None:
        for engine in self._engines:
            await engine.dispose()

    async def make(self, *names: str, owner: str = "ada", generation: str | None = None) -> None:
        """Record runs, each a second younger than the one before."""
        for number, name in enumerate(names):
            session = Session(id=name, owner=owner, sdk_version="1", tags=[], user_metadata={})
            await self.catalog.add_session(session)
            run = TrainingRun(
                id=f"{name}:train:0",
                session_id=name,
                owner=owner,
                base_model="tiny",
                spec={},
                created_at=NOON + timedelta(seconds=number),
                generation=generation,
            )
            await self.catalog.add_run(run)

    async def admit(self, name: str, tenants: Sequence[Tenant], replica: int = 0) -> Waiting | None:
        return await self.quotas[replica].admit(f"{name}:train:0", tenants, ALWAYS)


@pytest.fixture
async def replicas(database_url: str) -> AsyncIterator[Replicas]:
    found = Replicas(database_url)
    await found.open()
    yield found
    await found.close()


async def test_racing_replicas_never_admit_more_than_the_limit_and_the_oldest_first(
    replicas: Replicas,
) -> None:
    names = [f"run{number}" for number in range(8)]
    tenants = [a_tenant(3)]
    await replicas.make(*names)

    asked = [replicas.admit(name, tenants, replica) for name in names for replica in (0, 1)]
    answers = await asyncio.gather(*asked)

    started = [name for name, answer in zip(names, answers[::2], strict=True) if answer is None]
    assert started == names[:3]
    found = await replicas.quotas[1].claimants(tenants[0], tenants, ALWAYS)
    assert (usage(found).models, usage(found).waiting) == (3, 5)
    assert "uses 3 of 3" in str(await replicas.admit("run7", tenants))


async def test_the_oldest_that_waits_starts_when_another_run_is_deleted(replicas: Replicas) -> None:
    tenants = [a_tenant(1)]
    await replicas.make("first", "second", "third")
    assert await replicas.admit("first", tenants) is None

    await replicas.catalog.delete_run("first:train:0")

    assert await replicas.admit("third", tenants) is not None
    assert await replicas.admit("second", tenants) is None


async def test_the_limit_counts_all_owners_of_the_tenant_and_no_others(replicas: Replicas) -> None:
    tenants = [a_tenant(1, "team-*")]
    await replicas.make("of-grace", owner="grace", generation="g")
    await replicas.make("of-blue", owner="team-blue", generation="g")
    await replicas.make("of-red", owner="team-red")
    await replicas.make("another", owner="grace")

    assert await replicas.admit("of-red", tenants) is not None
    assert await replicas.admit("another", tenants) is None


async def test_copied_checkpoints_and_models_of_inactive_clients_take_no_place(
    replicas: Replicas,
) -> None:
    tenants = [a_tenant(1)]
    await replicas.make("copy", generation=STORED)
    await replicas.make("old", generation="g")
    await replicas.make("new")

    assert await replicas.admit("new", tenants) is not None
    future = datetime.now(UTC) + timedelta(hours=1)
    assert await replicas.quotas[0].admit("new:train:0", tenants, future) is None


async def test_a_run_that_has_started_keeps_its_place_below_a_lowered_limit(
    replicas: Replicas,
) -> None:
    await replicas.make("first", "second")
    assert await replicas.admit("first", [a_tenant(1)]) is None

    assert await replicas.admit("first", [a_tenant(0)]) is None
    assert await replicas.admit("second", [a_tenant(0)]) is not None
    assert await replicas.admit("second", []) is None
