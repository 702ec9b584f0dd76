"""The route table: no route without a declared authentication, and no stale rule about routes."""

import re
from pathlib import Path

import pytest
from fastapi import APIRouter
from starlette.testclient import TestClient

from tinkercloud_api.access import mutations
from tinkercloud_api.access.mutations import audited_event, is_mutation
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import Application
from tinkercloud_api.serve.route_table import (
    Authentication,
    Row,
    UndeclaredRouteError,
    authentication_of,
    table,
)
from tinkercloud_testing.providers import OneHead

UNAUDITED = {
    # They ask for something that the caller may see.
    *("retrieve_future", "retrieve_future/{request_id}", "get_info"),
    *("weights_info", "checkpoints/search", "sessions/search", "auth/token", "telemetry"),
    *("client/config", "client/dynamic_config"),
    # They are too many; the ledger of usage counts what they compute.
    *("forward_backward", "forward", "optim_step", "asample", "sample", "cancel_future"),
    *("session_heartbeat", "cleanup_futures", "join_sampling_session"),
    "programs/{program_id}/progress",
}
"""Paths below /api/v1/ whose methods other than GET are not in the audit log."""


@pytest.fixture
def app(tmp_path: Path) -> Application:
    return Application(Settings(state_dir=tmp_path), OneHead())


def test_a_route_outside_all_areas_stops_the_server() -> None:
    router = APIRouter()

    @router.get("/secrets/{name}")
    async def show(name: str) -> str:
        return name

    with pytest.raises(UndeclaredRouteError, match=r"GET /secrets/\{name\}: .* add its path"):
        table(router.routes)


@pytest.mark.parametrize(
    ("path", "authentication"),
    [
        ("/api/v1/healthz", Authentication.NONE),
        ("/api/v1/healthz/", Authentication.KEY),
        ("/api/v1/healthzz", Authentication.KEY),
        ("/api/v1/", Authentication.KEY),
        ("/api/v1", None),
        ("/livez/of", None),
        ("/oai/sessions/x~y/datums", Authentication.KEY),
        ("/uploads/x/y", Authentication.SIGNED_URL),
        ("/login/callback", Authentication.LOGIN),
    ],
)
def test_paths_are_in_the_area_of_their_prefix_or_of_themselves(
    path: str, authentication: Authentication | None
) -> None:
    assert authentication_of(path) is authentication


def test_routes_that_the_table_says_need_a_key_reject_callers_without_one(
    app: Application,
) -> None:
    answers = {}
    with TestClient(app) as client:
        for row in app.route_table:
            if row.authentication is Authentication.KEY:
                path = re.sub(r"\{[^}]+\}", "a~b", row.path)
                answers[row.method, row.path] = client.request(row.method, path).status_code

    assert len(answers) > 90
    assert {route: status for route, status in answers.items() if status != 401} == {}


def changes(row: Row) -> bool:
    """Return whether a route is below /api/v1/ and not a GET."""
    return row.method not in {"GET", "HEAD"} and row.path.startswith("/api/v1/")


def test_every_route_that_changes_something_has_an_event_of_its_own(app: Application) -> None:
    rows = [row for row in app.route_table if changes(row)]

    assert {row.path.removeprefix("/api/v1/") for row in rows if not row.event} == UNAUDITED
    assert [row for row in rows if row.event == "unknown_request"] == []


def test_the_rules_about_mutations_name_only_routes_that_exist(app: Application) -> None:
    rows, paths = app.route_table, {row.path for row in app.route_table}
    events = {event for _, _, event in mutations._EVENTS}

    assert events == {row.event for row in rows if row.event}
    assert paths >= mutations._READS | mutations._WORK
    assert not is_mutation("POST", "/api/v1/get_info")
    assert audited_event("POST", "/api/v1/a_call_of_next_year") == "unknown_request"
