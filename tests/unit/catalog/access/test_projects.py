"""Projects in the catalog: members, deleted ones, and what lists show."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from tinkercloud_api.access.access_tokens import AccessTokens
from tinkercloud_api.access.auth import Authenticator, hash_key, new_key
from tinkercloud_api.access.effects import READS, WORKS
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.access.project_rows import Claim
from tinkercloud_api.catalog.access.user_rows import Login, LoginKey
from tinkercloud_api.catalog.access.visibility import EVERYTHING, Visibility
from tinkercloud_api.catalog.schema.connection import migrate, open_database
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import SamplingSession, Session, TrainingRun, Upload, now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.catalog.usage.usage_ledger import UsageLedger, UsageQuery
from tinkercloud_protocol.heads.checkpoint_manifest import CheckpointManifest
from tinkercloud_protocol.heads.reports.usage_reports import UsageEntry, UsageReport
from tinkercloud_protocol.wire.errors import Forbidden, InvalidRequest, NotFound, Unauthenticated

PAGE = Page(0, 100)
TOKENS = AccessTokens("a secret of the tests, long enough for HMAC")


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = open_database(database_url)
    await migrate(engine)
    yield engine
    await engine.dispose()


@pytest.fixture
def catalog(engine: AsyncEngine) -> Catalog:
    return Catalog(engine)


def a_session(name: str, owner: str, project_id: str | None) -> Session:
    return Session(
        id=name, owner=owner, project_id=project_id, sdk_version="1", tags=[], user_metadata={}
    )


async def add_label(catalog: Catalog, name: str, owner: str, label: str) -> None:
    """Record a session with an id that is no project, as after the project was deleted."""
    await catalog.ensure_session(a_session(name, owner, label))


async def add_run(catalog: Catalog, session_id: str, owner: str) -> str:
    run_id = f"{session_id}:train:0"
    run = TrainingRun(id=run_id, session_id=session_id, owner=owner, base_model="m", spec={})
    await catalog.add_run(run)
    return run_id


async def test_a_project_gets_an_id_although_sessions_without_a_project_exist(
    catalog: Catalog,
) -> None:
    await catalog.add_session(a_session("s", "me", None))

    first = await catalog.add_project(None, "Vision", "me")
    second = await catalog.add_project(None, "Vision", "me")

    assert first.id.startswith("proj-")
    assert second.id not in {first.id, None}


async def test_rows_name_the_project_of_their_session(catalog: Catalog) -> None:
    await catalog.add_project("p", "P", "ann")
    await catalog.add_session(a_session("s", "ann", "p"))
    run_id = await add_run(catalog, "s", "ann")
    sampler = SamplingSession(id="s:sample:0", session_id="s", owner="ann", base_model="m")
    await catalog.add_sampler(sampler)
    await catalog.index_checkpoint(a_manifest(run_id))

    session, run = await catalog.session("s"), await catalog.run(run_id)
    (checkpoint,) = await catalog.checkpoints_of_runs([run_id])
    found = await catalog.sampler("s:sample:0")

    assert session is not None
    assert run is not None
    assert found is not None
    assert (session.project, run.project, found.project, checkpoint.project) == ("p",) * 4
    assert (await catalog.claim(a_manifest(run_id))).project == "p"
    assert await catalog.project_of_session("s") == "p"


def a_manifest(run_id: str) -> CheckpointManifest:
    return CheckpointManifest.model_validate(
        {
            "tinker_path": f"tinker://{run_id}/weights/x",
            "owner": "ann",
            "base_model": "m",
            "lora": None,
            "step": 1,
            "created_at": "2026-01-01T00:00:00Z",
            "files": {},
        }
    )


async def test_a_session_in_a_project_is_not_the_one_that_an_owners_requests_share(
    catalog: Catalog,
) -> None:
    await catalog.add_project("p", "P", "ann")
    await catalog.add_session(a_session("in a project", "ann", "p"))
    assert await catalog.open_session("ann", "1") is None

    await catalog.add_session(a_session("s", "ann", None))

    found = await catalog.open_session("ann", "1")
    assert found is not None
    assert found.id == "s"


async def test_a_list_shows_own_objects_and_those_of_the_callers_projects(catalog: Catalog) -> None:
    for project in ("p", "q"):
        await catalog.add_project(project, project, "ann")
    in_projects: list[tuple[str, str, str | None]] = [
        *(("a1", "ann", None), ("a2", "ann", "p")),
        *(("b1", "bob", None), ("b2", "bob", "p"), ("b3", "bob", "q")),
    ]
    for name, owner, place in in_projects:
        await catalog.add_session(a_session(name, owner, place))
        await add_run(catalog, name, owner)
    await add_label(catalog, "a3", "ann", "label")
    await add_run(catalog, "a3", "ann")

    async def shown(visible: Visibility) -> set[str]:
        runs, total = await catalog.runs(visible, PAGE)
        sessions = set(await catalog.sessions(visible, PAGE))
        assert {run.session_id for run in runs} == sessions
        assert total == len(sessions)
        return sessions

    mine, shared = frozenset({"p"}), Visibility("bob", frozenset({"p"}), frozenset({"p"}))
    assert await shown(Visibility("bob", mine)) == {"b1", "b2"}
    assert await shown(shared) == {"b1", "b2", "a2"}
    assert await shown(Visibility("ann", frozenset())) == {"a1", "a3"}
    assert await shown(Visibility("bob")) == {"b1", "b2", "b3"}
    assert await shown(EVERYTHING) == {"a1", "a2", "a3", "b1", "b2", "b3"}


async def test_every_change_of_rights_has_a_new_version(catalog: Catalog) -> None:
    await catalog.add_session(a_session("s", "ann", None))
    key, other = [
        await catalog.add_key(key_hash=name, name=name, owner="ann", role="user") for name in "ab"
    ]
    versions = [await catalog.access_version()]
    for change in (
        catalog.add_project("p", "P", "ann"),
        catalog.set_member("p", "bob", "viewer"),
        catalog.set_project("s", "p"),
        catalog.remove_member("p", "bob"),
        catalog.add_user("bob", None),
        catalog.set_user_role("bob", "read-only"),
        catalog.set_disabled("bob", None),
        catalog.add_project("empty", "E", "ann"),
        catalog.delete_project("empty"),
        catalog.revoke_key(key.id),
        catalog.rotate_key(other.id, "successor", now()),
        catalog.add_bootstrap_key(key_hash="first", name="n", owner="ann", role="admin"),
    ):
        await change
        versions.append(await catalog.access_version())

    assert versions == sorted(set(versions))


async def test_a_project_keeps_an_admin_even_if_two_leave_at_once(catalog: Catalog) -> None:
    await catalog.add_project("p", "P", "ann")
    await catalog.set_member("p", "bob", "admin")

    outcomes = await asyncio.gather(
        catalog.remove_member("p", "ann"),
        catalog.set_member("p", "bob", "member"),
        return_exceptions=True,
    )

    assert [type(outcome) for outcome in outcomes].count(InvalidRequest) == 1
    assert "admin" in {row.role for row in await catalog.members("p")}
    (admin,) = [row.owner for row in await catalog.members("p") if row.role == "admin"]
    with pytest.raises(InvalidRequest, match="is the only admin"):
        await catalog.remove_member("p", admin)


async def test_one_of_two_owners_who_disable_each_other_at_once_stays_enabled(
    catalog: Catalog,
) -> None:
    for name in ("ann", "bob"):
        await catalog.add_key(key_hash=name, name=name, owner=name, role="admin")

    outcomes = await asyncio.gather(
        catalog.set_disabled("ann", now(), by="bob"),
        catalog.set_disabled("bob", now(), by="ann"),
        return_exceptions=True,
    )

    assert [type(outcome) for outcome in outcomes].count(Forbidden) == 1
    assert [user.disabled_at is None for user in await catalog.users()].count(True) == 1


async def log_in(catalog: Catalog, name: str, *groups: str, days: float = 1) -> None:
    await catalog.log_in(
        Login(
            subject=f"issuer|{name}",
            name=name,
            role="user",
            kept_roles=frozenset(),
            groups=frozenset(groups),
            key_name=LoginKey.SHOWN,
            key_hash=new_key(),
            expires_at=now() + timedelta(days=days),
        )
    )


async def test_an_owner_has_the_most_rights_of_itself_and_its_groups(catalog: Catalog) -> None:
    for project in ("p", "q", "r"):
        await catalog.add_project(project, project, "ann")
    await catalog.set_member("p", "bob", "viewer")
    await catalog.set_member("p", "group:a", "member")
    await catalog.set_member("p", "group:b", "viewer")
    await catalog.set_member("q", "group:b", "admin")
    await catalog.set_member("r", "group:c", "admin")

    await log_in(catalog, "bob", "a", "b")
    assert await catalog.memberships("bob") == {"p": "member", "q": "admin"}
    assert {row.id for row in await catalog.projects("bob", PAGE)} == {"p", "q"}
    await log_in(catalog, "bob", "b")
    assert await catalog.memberships("bob") == {"p": "viewer", "q": "admin"}
    await log_in(catalog, "bob", "b", days=-1)
    assert await catalog.memberships("bob") == {"p": "viewer"}
    await log_in(catalog, "bob")
    assert await catalog.memberships("bob") == {"p": "viewer"}


async def test_a_group_is_no_owner_and_no_last_admin(catalog: Catalog) -> None:
    await catalog.add_project("p", "P", "ann")
    await catalog.set_member("p", "group:a", "admin")

    with pytest.raises(InvalidRequest, match="'ann' is the only admin"):
        await catalog.remove_member("p", "ann")
    assert await catalog.memberships("group:a") == {}
    assert [user.name for user in await catalog.users()] == ["ann"]
    assert not await catalog.set_disabled("group:a", now())
    await catalog.remove_member("p", "group:a")
    assert [row.owner for row in await catalog.members("p")] == ["ann"]


async def test_creating_a_project_again_returns_it_but_never_a_taken_one(catalog: Catalog) -> None:
    first = await catalog.add_project("p", "P", "ann")
    assert (await catalog.add_project("p", "P", "ann")).created_at == first.created_at
    await add_label(catalog, "s", "ann", "label")

    with pytest.raises(InvalidRequest, match="is already used"):
        await catalog.add_project("p", "P", "bob")
    with pytest.raises(InvalidRequest, match="is already used"):
        await catalog.add_project("label", "L", "bob")
    assert await catalog.memberships("bob") == {}


async def test_a_project_is_renamed_under_the_same_id(catalog: Catalog) -> None:
    await catalog.add_project("p", "P", "ann")

    await catalog.rename_project("p", "Vision")

    renamed = await catalog.project("p")
    assert renamed is not None
    assert (renamed.id, renamed.name, renamed.created_by) == ("p", "Vision", "ann")


async def test_a_project_is_deleted_when_it_holds_nothing_any_more(catalog: Catalog) -> None:
    await catalog.add_project("p", "P", "ann")
    await catalog.add_session(a_session("s", "ann", "p"))
    manifest = a_manifest(await add_run(catalog, "s", "ann"))
    upload = an_upload("p")

    with pytest.raises(InvalidRequest, match=r"sessions that have not ended \(1, such as s\);"):
        await catalog.delete_project("p")
    await catalog.record_pending_checkpoint(manifest.path, "ann")
    await catalog.finish_session("s", "success", None)
    with pytest.raises(InvalidRequest, match=r"contains checkpoints \(1, such as tinker://s:train"):
        await catalog.delete_project("p")
    await catalog.index_checkpoint(manifest)
    await catalog.add_upload(upload, 1)
    with pytest.raises(InvalidRequest, match=r"/weights/x\) and unfinished uploads or copies \(1"):
        await catalog.delete_project("p")
    await catalog.mark_finished(upload.id)
    await catalog.set_expiry(manifest.path, now())
    await catalog.delete_project("p")
    await catalog.delete_project("p")

    assert await catalog.project("p") is None
    assert await catalog.memberships("ann") == {}


def an_upload(project_id: str) -> Upload:
    return Upload(
        id="upload",
        owner="ann",
        project_id=project_id,
        manifest={},
        adapter_config={},
        size_bytes=0,
        expires_at=now() + timedelta(hours=1),
    )


async def test_what_ended_in_a_deleted_project_is_its_owners_and_no_other_project_gets_it(
    catalog: Catalog,
) -> None:
    await catalog.add_project("p", "P", "ann")
    await catalog.set_member("p", "bob", "member")
    await catalog.add_session(a_session("s", "bob", "p"))
    await catalog.finish_session("s", "success", None)

    await catalog.delete_project("p")

    left = await catalog.session("s")
    assert left is not None
    assert (left.project_id, left.project) == ("p", None)
    with pytest.raises(InvalidRequest, match="is already used"):
        await catalog.add_project("p", "P", "ann")


async def test_nothing_is_added_to_a_deleted_project(catalog: Catalog) -> None:
    await catalog.add_project("p", "P", "ann")
    await catalog.add_session(a_session("s", "ann", None))
    await catalog.delete_project("p")

    for change in (
        catalog.add_session(a_session("late", "ann", "p")),
        catalog.set_project("s", "p"),
        catalog.set_member("p", "bob", "member"),
    ):
        with pytest.raises(NotFound, match="does not exist any more"):
            await change
    assert await catalog.session("late") is None


async def test_a_project_that_is_deleted_never_has_a_session_that_is_created_at_once(
    catalog: Catalog,
) -> None:
    for number in range(10):
        name = f"p{number}"
        await catalog.add_project(name, "P", "ann")
        changes = [
            catalog.delete_project(name),
            catalog.add_session(a_session(f"s{number}", "ann", name)),
        ]

        outcomes = await asyncio.gather(*changes[:: (-1) ** number], return_exceptions=True)

        (error,) = [outcome for outcome in outcomes if outcome is not None]
        is_kept = await catalog.project(name) is not None
        assert type(error) is (InvalidRequest if is_kept else NotFound)
        assert (await catalog.session(f"s{number}") is not None) is is_kept


def usage_of_sessions(*names: str) -> UsageReport:
    """Return a report of three tokens of ann in each of some sessions."""
    entries = [
        UsageEntry(
            hour=7,
            owner="ann",
            session_id=session,
            model_id=f"{session}:train:0",
            trained_tokens=3,
            engine_seconds=0.5,
        )
        for session in names
    ]
    return UsageReport(generation="g", base_model="m", entries=entries)


async def test_usage_is_summed_up_by_project(engine: AsyncEngine, catalog: Catalog) -> None:
    await catalog.add_project("p", "P", "ann")
    await catalog.add_session(a_session("s", "ann", "p"))
    ledger = UsageLedger(engine)
    await ledger.record(usage_of_sessions("s", "gone"))

    rows = await ledger.totals(UsageQuery("project", "ann"), PAGE)

    assert {row.project_id: row.amounts["trained_tokens"] for row in rows} == {"p": 3, None: 3}


async def test_usage_is_summed_up_by_the_keys_that_created_the_sessions(
    engine: AsyncEngine, catalog: Catalog
) -> None:
    ids = {}
    for key, sessions in (("ci", ("s0", "s1")), ("laptop", ("s2",))):
        row = await catalog.add_key(key_hash=key, name=key, owner="ann", role=Role.USER)
        ids[key] = row.id
        for name in sessions:
            session = a_session(name, "ann", None)
            session.key_id = row.id
            await catalog.add_session(session)
    await catalog.revoke_key(ids["ci"])
    ledger = UsageLedger(engine)
    await ledger.record(usage_of_sessions("s0", "s1", "s2", "gone"))

    rows = await ledger.totals(UsageQuery("key", "ann"), PAGE)

    counted = {(row.key_id, row.key_name): row.amounts["trained_tokens"] for row in rows}
    assert counted == {(ids["ci"], "ci"): 6, (ids["laptop"], "laptop"): 3, (None, None): 3}


async def test_a_disabled_owner_a_removed_member_and_a_revoked_key_are_refused_by_every_replica(
    catalog: Catalog, database_url: str
) -> None:
    await catalog.add_project("p", "P", "ann")
    await catalog.set_member("p", "bob", "viewer")
    key = new_key()
    await catalog.add_key(key_hash=hash_key(key), name="n", owner="bob", role=Role.ADMIN)
    await catalog.set_user_role("bob", Role.USER)
    second = open_database(database_url)
    replicas = [Authenticator(each, lambda _: None, TOKENS) for each in (catalog, Catalog(second))]
    found = Claim("ann", "p")

    for replica in replicas:
        bob = (await replica.principal(key)).requesting("POST", "/api/v1/optim_step", WORKS)
        assert bob.role is Role.USER
        with pytest.raises(Forbidden, match="is a viewer"):
            bob.require(found, "run")
        assert bob.require_read(found, "run") is found
    await catalog.remove_member("p", "bob")
    for replica in replicas:
        bob = (await replica.principal(key)).requesting("GET", "/api/v1/sessions", READS)
        with pytest.raises(NotFound):
            bob.require(found, "run")
    await catalog.set_member("p", "bob", "viewer")
    assert [(await each.principal(key)).projects for each in replicas] == [{"p": "viewer"}] * 2
    await catalog.delete_project("p")
    assert [(await each.principal(key)).projects for each in replicas] == [{}] * 2
    await catalog.set_disabled("bob", now())
    disabled = await catalog.user_summary("bob")
    assert disabled is not None
    assert disabled.keys == 0
    for replica in replicas:
        with pytest.raises(Unauthenticated, match="is disabled"):
            await replica.principal(key)
    await catalog.set_disabled("bob", None)
    for replica in replicas:
        assert (await replica.principal(key)).owner == "bob"
    row = await catalog.key(hash_key(key))
    assert row is not None
    await catalog.revoke_key(row.id)
    for replica in replicas:
        with pytest.raises(Unauthenticated, match="has been revoked"):
            await replica.principal(key)
    await second.dispose()
