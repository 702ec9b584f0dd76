"""What a running API server consists of.

A merge can remove a periodic task or a step together with nothing that fails. These lists are
written out here so that it can't be removed unnoticed.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from pathlib import Path
from types import ModuleType

import aiohttp
import httpx
import pytest

from tinkercloud_api.access import server_acts
from tinkercloud_api.access.auditing import Auditing
from tinkercloud_api.catalog.access.console_tokens import ConsoleTokens
from tinkercloud_api.catalog.runs.run_points import RunPoints
from tinkercloud_api.catalog.schema import connection
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.catalog.usage.stored_days import StoredDays
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.config import api_metrics
from tinkercloud_api.config.sections.login_settings import OidcSettings
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.heads.activity import Activity
from tinkercloud_api.heads.deleted_runs import DeletedRuns
from tinkercloud_api.heads.deliveries import Deliveries
from tinkercloud_api.heads.head_locator import HeadLocator
from tinkercloud_api.heads.run_admission import RunAdmission
from tinkercloud_api.heads.shared_heads import SharedHeads
from tinkercloud_api.login.login_pages import LoginPages
from tinkercloud_api.runs.base_models import BaseModels
from tinkercloud_api.runs.owner_programs import Programs
from tinkercloud_api.runs.training_runs import TrainingRuns
from tinkercloud_api.serve import assembly
from tinkercloud_api.serve.api_app import Application, running_context
from tinkercloud_api.serve.hot_paths import HotPaths
from tinkercloud_api.transfers.stored_runs import StoredRuns
from tinkercloud_api.web.middleware import (
    BodyLimitMiddleware,
    MetricsMiddleware,
    MetricsServer,
    RequestIdMiddleware,
    ShortPathMiddleware,
)
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import served

Noted = tuple[type | ModuleType, str]
"""A method of a class, or a function of a module."""
HOUSEKEEPING: list[Noted] = [
    (HeadLocator, "note_running"),
    (Activity, "write"),
    (Catalog, "count_live_sessions"),
    (TrainingRuns, "expire_sessions"),
    (Checkpoints, "delete_expired"),
    (StoredRuns, "sweep"),
    (HeadLocator, "report_lost"),
    (DeletedRuns, "release_leftovers"),
    (Auditing, "forget"),
    (RunPoints, "forget"),
    (Catalog, "make_searchable"),
    (ConsoleTokens, "forget"),
    (StoredDays, "measure"),
]
CARE_FOR_HEADS: list[Noted] = [
    (SharedHeads, "suspend_inactive"),
    (SharedHeads, "drop_orphans"),
]
OPENING: list[Noted] = [
    (connection, "migrate"),
    (server_acts, "record_settings"),
    (server_acts, "register_bootstrap_key"),
]
STARTUP: list[Noted] = [
    (MetricsServer, "start"),
    (LoginPages, "open"),
    (OneHead, "start"),
]
WITH_HEADS: list[Noted] = [
    (BaseModels, "start"),
    (Deliveries, "start"),
    (Programs, "start"),
    (api_metrics, "measure"),
]
SHUTDOWN: list[Noted] = [
    (BaseModels, "stop"),
    (Deliveries, "stop"),
    (Programs, "stop"),
    (OneHead, "stop"),
    (HeadLocator, "report_lost"),
    (Activity, "write"),
]
CLOSING: list[Noted] = [
    (aiohttp.ClientSession, "close"),
    (Catalog, "close"),
    (MetricsServer, "stop"),
]
TASKS = {
    "_run_housekeeping",
    "_care_for_heads",
    "SampledRuns.follow",
    "Deliveries._deliver_leftovers",
    "Programs._write_changes",
}
"""Coroutines that run as long as a server without tenants, whose task `follow` ends at once."""
MIDDLEWARE: list[Noted] = [
    (ShortPathMiddleware, "__call__"),
    (RequestIdMiddleware, "__call__"),
    (MetricsMiddleware, "__call__"),
    (HotPaths, "__call__"),
    (BodyLimitMiddleware, "__call__"),
]


def named(calls: list[Noted]) -> list[str]:
    return [f"{owner.__name__}.{name}" for owner, name in calls]


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that notes calls of methods from then on."""

    def begin(*methods: Noted) -> list[str]:
        calls: list[str] = []

        def note(owner: type | ModuleType, name: str) -> None:
            original = getattr(owner, name)

            @wraps(original)
            def noted(*args: object, **kwargs: object) -> object:
                calls.append(f"{owner.__name__}.{name}")
                return original(*args, **kwargs)

            monkeypatch.setattr(owner, name, noted)

        for owner, name in methods:
            note(owner, name)
        return calls

    return begin


def running() -> set[str]:
    """Return the coroutines of all tasks except the caller's."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    return {getattr(task.get_coro(), "__qualname__", "") for task in others}


async def test_a_running_server_takes_all_periodic_steps(
    tmp_path: Path, follow: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "_UP_FOR_EXPIRY", timedelta(0))
    kept, cared = follow(*HOUSEKEEPING), follow(*CARE_FOR_HEADS)
    settings = Settings(state_dir=tmp_path, session_expiry_days=1)

    async with running_context(settings, OneHead()), asyncio.timeout(PATIENCE_SECONDS):
        while len(kept) < len(HOUSEKEEPING) or len(cared) < len(CARE_FOR_HEADS):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        # Calls of the database are short tasks of their own.
        while running() != TASKS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    assert kept[: len(HOUSEKEEPING)] == named(HOUSEKEEPING)
    assert cared[: len(CARE_FOR_HEADS)] == named(CARE_FOR_HEADS)
    assert len(assembly.HOUSEKEEPING) == len(HOUSEKEEPING)
    assert len(assembly.CARE_FOR_HEADS) == len(CARE_FOR_HEADS)
    assert {
        "housekeeping",
        "care for heads",
        "follow ended runs",
        "notify heads whose samples are kept",
    } == {task.name for task in assembly.TASKS}


def with_logins(folder: Path) -> Settings:
    secret = folder / "secret"
    secret.write_text("secret")
    oidc = OidcSettings(
        issuer="https://login.example.com",
        client_id="tinkercloud",
        client_secret_file=secret,
        allow_all_accounts=True,
    )
    return Settings(state_dir=folder, oidc=oidc, public_url="https://tinkercloud.example.com")


async def test_a_server_takes_all_steps_of_its_startup_and_shutdown_even_if_one_fails(
    tmp_path: Path, follow: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: object) -> None:
        raise OSError("full disk")

    monkeypatch.setattr(Programs, "stop", fail)
    beginning: list[Noted] = [*OPENING, *STARTUP, *WITH_HEADS, (RunAdmission, "follow")]
    started = follow(*beginning)
    async with running_context(with_logins(tmp_path), OneHead()):
        await asyncio.sleep(0)
        stopped = follow(*SHUTDOWN, *CLOSING)

    assert started == named(beginning)
    assert stopped == named([*SHUTDOWN, *CLOSING])
    assert len(assembly.OPENING) == len(OPENING)
    assert len(assembly.STARTUP) == len(STARTUP)
    assert len(assembly.WITH_HEADS) == len(WITH_HEADS)
    assert len(assembly.SHUTDOWN) == len(SHUTDOWN)
    assert len(assembly.CLOSING) == len(CLOSING)


async def test_a_server_whose_startup_fails_closes_what_it_has_opened(
    tmp_path: Path, follow: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise OSError("no device")

    monkeypatch.setattr(OneHead, "start", fail)
    closed = follow(*SHUTDOWN, *CLOSING)

    with pytest.raises(OSError, match="no device"):
        async with running_context(Settings(state_dir=tmp_path), OneHead()):
            pass

    assert closed == named(CLOSING)


async def test_no_head_starts_if_the_logins_cannot_be_opened(
    tmp_path: Path, follow: Callable[..., list[str]]
) -> None:
    settings = with_logins(tmp_path)
    (tmp_path / "secret").unlink()
    calls = follow((OneHead, "start"), *CLOSING)

    with pytest.raises(FileNotFoundError, match="secret"):
        async with running_context(settings, OneHead()):
            pass

    assert calls == named(CLOSING)


async def test_a_server_that_fails_once_its_heads_run_stops_what_runs(
    tmp_path: Path, follow: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise OSError("full disk")

    before = running()
    monkeypatch.setattr(Programs, "start", fail)
    stopped = follow(*SHUTDOWN, *CLOSING)

    with pytest.raises(OSError, match="full disk"):
        async with running_context(Settings(state_dir=tmp_path), OneHead()):
            pass

    assert stopped == named([*SHUTDOWN, *CLOSING])
    assert running() == before


@pytest.mark.parametrize(
    ("step", "closed"),
    [
        ((server_acts, "record_settings"), [(Catalog, "close")]),
        ((Catalog, "shared_secret"), CLOSING[:2]),
    ],
)
async def test_a_server_that_fails_before_its_components_exist_closes_its_connections(
    tmp_path: Path,
    follow: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    step: Noted,
    closed: list[Noted],
) -> None:
    async def fail(*_: object) -> None:
        raise OSError("full disk")

    monkeypatch.setattr(*step, fail)
    calls = follow(*CLOSING)

    with pytest.raises(OSError, match="full disk"):
        async with running_context(Settings(state_dir=tmp_path), OneHead()):
            pass

    assert calls == named(closed)


async def test_requests_pass_all_middleware_in_order(
    tmp_path: Path, follow: Callable[..., list[str]]
) -> None:
    app = Application(Settings(state_dir=tmp_path), OneHead())

    async with served(app) as url, httpx.AsyncClient(base_url=url) as client:
        await client.get("/livez")
        passed = follow(*MIDDLEWARE)
        assert (await client.get("/livez")).status_code == 200
        of_request = [*passed]

    assert of_request == named(MIDDLEWARE)
    assert len(assembly.MIDDLEWARE) == len(MIDDLEWARE)
