"""The route table: no route without a declared authentication, and no stale rule about routes."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from starlette.routing import compile_path
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from tinkercloud_api.access import failed_logins
from tinkercloud_api.access.effects import (
    READS,
    UNKNOWN,
    WORKS,
    Effect,
    changes,
    declares,
)
from tinkercloud_api.config.sections.login_settings import OidcSettings
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import Application
from tinkercloud_api.serve.hot_routes import routes_at
from tinkercloud_api.serve.route_table import (
    Authentication,
    Effects,
    Row,
    UndeclaredRouteError,
    authentication_of,
    table,
)
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import served

KEY = "tml-a-valid-key-of-these-tests"
UNKNOWN_ROUTE = re.compile(r"is not supported by this server|^Not Found$")
"""What is said of routes and methods that nothing serves, the last one below /login."""


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


def test_no_request_fits_routes_of_two_modules_whose_order_would_decide(app: Application) -> None:
    rows = [row for row in app.route_table if row.hot is None]
    paths = [(re.sub(r"\{[^}]+\}", "a~b", row.path), row) for row in rows]
    several = [
        (row.path, other.path)
        for path, row in paths
        for other in rows
        if row.method == other.method and module_of(row) != module_of(other)
        if compile_path(other.path)[0].match(path)
    ]

    assert several == []


def module_of(row: Row) -> str:
    return row.handler.rpartition(".")[0]


def test_failed_logins_are_limited_where_the_table_says_so(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_logins, "_ATTEMPTS_PER_SECOND", 0.0)
    rows = {row.authentication: row for row in app.route_table if row.method == "GET"}
    limited = set()
    with TestClient(app) as client:
        for authentication, row in rows.items():
            path = re.sub(r"\{[^}]+\}", "a~b", row.path)
            for attempt in range(21):
                sent = {"x-api-key": f"tml-{attempt}", "cookie": f"tinkercloud-console={attempt}"}
                if client.get(path, headers=sent).status_code == 429:
                    limited.add(authentication)

    assert len(rows) == 4
    assert limited == {each for each in rows if each.limits_failed_logins}


@pytest.mark.timeout(120)
async def test_a_request_with_a_key_is_dispatched_to_the_handler_that_the_table_names(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret").write_text("secret")
    oidc = OidcSettings(
        issuer="https://127.0.0.1:9",
        client_id="tinkercloud",
        client_secret_file=tmp_path / "secret",
        allow_all_accounts=True,
    )
    settings = Settings(
        state_dir=tmp_path,
        bootstrap_key=KEY,
        oidc=oidc,
        public_url="https://tinkercloud.example.com",
    )
    app, handlers, wrong = Application(settings, OneHead()), [""], {}

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        finally:
            handlers.append(name_of(scope.get("endpoint")))

    # The route that revokes the key comes last.
    rows = sorted(app.route_table, key=lambda row: row.effect.event == "key_revoke")
    async with served(noting) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for row in rows:
            path = re.sub(r"\{[^}]+\}", "a~b", row.path)
            method = "GET" if row.method == "*" else row.method
            answer = await client.request(method, path, json={}, headers={"x-api-key": KEY})
            if row.hot is None and row.authentication is not Authentication.LOGIN:
                is_served = handlers[-1] == row.handler
            else:
                is_served = answer.status_code != 401 and not UNKNOWN_ROUTE.search(answer.text)
            if not is_served:
                wrong[row.method, row.path] = handlers[-1], answer.status_code, answer.text

    assert wrong == {}
    assert len(handlers) > len(rows) > 130


def name_of(endpoint: Any) -> str:
    module = getattr(endpoint, "__module__", "").removeprefix("tinkercloud_api.")
    return f"{module}.{getattr(endpoint, '__qualname__', '')}"


def test_a_route_that_does_not_declare_what_its_requests_do_stops_the_server() -> None:
    router = APIRouter()

    @router.put("/api/v1/rename")
    async def rename() -> str:
        return ""

    with pytest.raises(UndeclaredRouteError, match=r"PUT /api/v1/rename: .* not declared"):
        table(router.routes)
    declares(changes("thing_rename"))(rename)
    (row,) = [row for row in table(router.routes) if row.path == "/api/v1/rename"]
    assert row.effect.event == "thing_rename"


def test_a_request_has_the_effect_that_its_route_declares(app: Application) -> None:
    effects, sent = Effects(app.route_table), 0

    for row in app.route_table:
        if row.authentication is Authentication.KEY:
            path = re.sub(r"\{[^}]+\}", "a~b", row.path)
            assert effects.of(row.method, path, routes_at(path).by_method) == row.effect, row
            sent += row.effect.is_mutation
    assert sent > 40


@pytest.mark.parametrize(
    ("method", "path", "effect"),
    [
        ("DELETE", "/api/v1/training_runs/r/checkpoints/weights/x", changes("checkpoint_delete")),
        (
            *("DELETE", "/api/v1/training_runs/r/checkpoints/weights/x/publish"),
            changes("checkpoint_unpublish"),
        ),
        ("PUT", "/uploads/x/y", changes("checkpoint_import")),
        ("POST", "/api/v1/a_call_of_next_year", UNKNOWN),
        ("DELETE", "/api/v1/create_model", UNKNOWN),
        ("PUT", "/api/v1/optim_step", WORKS),
        ("PUT", "/api/v1/get_info", READS),
        ("HEAD", "/api/v1/nothing", READS),
        ("POST", "/oai/api/v1/nothing", WORKS),
        ("PUT", "/oai/sessions/x", WORKS),
    ],
)
def test_requests_that_fit_several_routes_or_none(
    app: Application, method: str, path: str, effect: Effect
) -> None:
    assert Effects(app.route_table).of(method, path, routes_at(path).by_method) == effect
