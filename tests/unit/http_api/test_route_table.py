"""The route table: no route without a declared authentication, and no stale rule about routes."""

import re
from pathlib import Path

import pytest
from fastapi import APIRouter
from starlette.testclient import TestClient

from tinkercloud_api.access.effects import (
    READS,
    UNKNOWN,
    WORKS,
    Effect,
    changes,
    declares,
)
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import Application
from tinkercloud_api.serve.route_table import (
    Authentication,
    Effects,
    UndeclaredRouteError,
    authentication_of,
    table,
)
from tinkercloud_testing.providers import OneHead


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
            assert effects.of(row.method, path) == row.effect, row
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
    assert Effects(app.route_table).of(method, path) == effect
