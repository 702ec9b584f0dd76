"""`/openapi.json` describes every supported call, with its response statuses."""

import json
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.testclient import TestClient

import tinkercloud_api.routes as api_routes
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import Application
from tinkercloud_api.serve.route_table import Authentication
from tinkercloud_protocol.wire import routes
from tinkercloud_testing.serving.providers import OneHead

KEY = "tml-a-valid-key-of-these-tests"
PACKAGE = f"{api_routes.__name__}."
NONE = APIRouter()


@pytest.fixture
async def client(tmp_path: Path) -> httpx.AsyncClient:
    app = Application(Settings(state_dir=tmp_path), OneHead())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://t")


@pytest.fixture
async def document(client: httpx.AsyncClient) -> dict[str, Any]:
    described: dict[str, Any] = (await client.get("/openapi.json")).json()
    return described


def test_exactly_the_routes_of_the_table_are_in_it(tmp_path: Path) -> None:
    app = Application(Settings(state_dir=tmp_path), OneHead())
    # Signed URLs of uploads come with the headers to send, and the document describes itself.
    unlisted = {("PUT", "/uploads/{upload_id}/{file}"), ("GET", "/openapi.json")}
    served = {
        (row.method, row.described_path)
        for row in app.route_table
        # Pages are no calls.
        if row.authentication is not Authentication.BROWSER
    }

    with TestClient(app) as client:
        paths = client.get("/openapi.json").json()["paths"]

    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert described ^ {route for route in served if route[0] != "HEAD" or route in described} == (
        unlisted
    )


async def test_calls_have_the_statuses_that_are_answered(document: dict[str, Any]) -> None:
    def statuses(path: str, method: str = "post") -> set[str]:
        return set(document["paths"][path][method]["responses"])

    assert statuses(routes.RETRIEVE_FUTURE) == {
        *("200", "400", "401", "404", "408", "410", "413", "429", "503")
    }
    assert statuses("/api/v1/telemetry") == {"200", "400", "401", "413", "429", "503"}
    assert statuses("/api/v1/training_runs/{run_id}", "get") == {
        *("200", "400", "401", "404", "429", "503")
    }
    assert statuses("/livez", "get") == {"200"}


async def test_calls_for_clients_without_the_sdk_are_in_it(document: dict[str, Any]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "use" / "http-api.md").read_text()
    shown = set(re.findall(r"\$URL(/\w+)", page)) - {"/sessions"}
    described = {path.removeprefix("/api/v1") for path in document["paths"]}
    sample = document["components"]["schemas"]["SampleOfWeights"]["properties"]

    assert shown <= described
    assert {"/health", "/retrieve_future/{request_id}", "/unload_model"} <= described
    assert {"sampling_session_id", "model_id", "model_path", "base_model"} <= set(sample)


def test_no_call_leaves_out_the_nulls_that_its_schema_has() -> None:
    modules = [import_module(found.name) for found in walk_packages(api_routes.__path__, PACKAGE)]
    calls = [route for module in modules for route in getattr(module, "router", NONE).routes]

    assert len(calls) > 50
    shortened = [
        call.path
        for call in calls
        if isinstance(call, APIRoute)
        and (call.response_model_exclude_none or call.response_model_exclude_unset)
    ]
    assert shortened == []


def examples(operation: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield arguments of requests: parameters that exist nowhere, and bodies that are wrong."""
    declared = operation.get("parameters", [])
    query = {each["name"]: "0" for each in declared if each["in"] == "query"}
    bodies: list[object] = [None]
    if "requestBody" in operation:
        bodies += [{"model_id": "s:train:0", "seq_id": 1, "session_id": "s"}, []]
    yield {"headers": {"x-api-key": "tml-nobody"}}
    for params in ({}, query):
        for body in bodies:
            yield {"params": params} if body is None else {"params": params, "json": body}


@pytest.mark.timeout(120)
def test_no_call_answers_with_a_status_that_it_does_not_list(tmp_path: Path) -> None:
    app = Application(Settings(state_dir=tmp_path, bootstrap_key=KEY), OneHead())
    headers = {"x-api-key": KEY, "range": "bytes=9999999-"}
    unlisted = []

    with TestClient(app, headers=headers, raise_server_exceptions=False) as client:
        for path, methods in client.get("/openapi.json").json()["paths"].items():
            for (method, operation), name in product(methods.items(), ("nope", "s:train:0")):
                url = re.sub(r"\{[^}]+\}", name, path)
                for arguments in examples(operation):
                    answer = client.request(method, url, follow_redirects=False, **arguments)
                    if str(answer.status_code) not in operation["responses"]:
                        unlisted.append((answer.status_code, method, url, arguments))

    assert unlisted == []


async def test_422_is_never_answered(document: dict[str, Any]) -> None:
    assert '"422"' not in json.dumps(document)


async def test_what_it_refers_to_is_in_it(document: dict[str, Any]) -> None:
    names = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document))

    assert names
    assert set(names) <= set(document["components"]["schemas"])


async def test_what_it_says_needs_a_key_does(
    client: httpx.AsyncClient, document: dict[str, Any]
) -> None:
    needs_key = {path for path, each in document["paths"].items() if "security" in str(each)}

    assert {path for path in document["paths"] if path.startswith(routes.PREFIX)} - needs_key == {
        "/api/v1/healthz"
    }


async def test_no_page_loads_scripts_from_elsewhere(client: httpx.AsyncClient) -> None:
    for page in ("/docs", "/redoc"):
        assert (await client.get(page)).status_code == 404
