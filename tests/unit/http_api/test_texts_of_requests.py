"""No text in a path, in a query or in a stored command makes the server fail."""

import re
from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path

import httpx
import pytest

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import Application
from tinkercloud_api.serve.route_table import Row
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.served_heads import served

KEY = "tml-a-valid-key-of-these-tests"
TEXT = "a%00%ED%A0%80%FFb"
"""A character that databases refuse, half a surrogate pair, and a byte of no character."""


def parameters(row: Row) -> set[str]:
    """Return the names of the parameters of a handler that are none of its path."""
    module, _, name = row.handler.rpartition(".")
    handler = getattr(import_module(f"tinkercloud_api.{module}"), name)
    of_path = re.findall(r"\{(\w+)", row.path)
    return {*signature(handler).parameters} - {"server", "caller", "session", "sent", *of_path}


def targets(app: Application) -> Iterator[tuple[str, str]]:
    """Yield each route with the text in all fields of its path, or in one parameter of its query.

    Left out is the route that revokes the key.
    """
    for row in app.route_table:
        if row.effect.event != "key_revoke":
            method = "GET" if row.method == "*" else row.method
            yield method, re.sub(r"\{[^}]+\}", TEXT, row.path)
            is_ours = row.hot is None and not row.handler.startswith("fastapi.")
            for name in parameters(row) if is_ours else set[str]():
                yield method, re.sub(r"\{[^}]+\}", "a~b", row.path) + f"?{name}={TEXT}"


@pytest.mark.timeout(120)
async def test_no_path_and_no_query_makes_the_server_fail(tmp_path: Path) -> None:
    app = Application(Settings(state_dir=tmp_path, bootstrap_key=KEY), OneHead())
    failed, sent = {}, 0
    async with (
        served(app) as url,
        httpx.AsyncClient(base_url=url, timeout=60, headers={"x-api-key": KEY}) as client,
    ):
        await client.post("/console/login", data={"key": KEY})
        for method, target in targets(app):
            answer = await client.request(method, target)
            sent += 1
            if answer.status_code >= 500:
                failed[method, target] = answer.text

    assert failed == {}
    assert sent > 200


async def test_a_recorded_command_that_is_no_text_is_listed(tmp_path: Path) -> None:
    app = Application(Settings(state_dir=tmp_path, bootstrap_key=KEY), OneHead())
    async with (
        served(app) as url,
        httpx.AsyncClient(base_url=url, headers={"x-api-key": KEY}) as client,
    ):
        await client.get("/livez")
        assert app.context is not None
        details = {"path": "tinkercloud backup create /b\udcff", "objects": ["b\udcff"]}
        await app.context.auditing.entries.begin("command:me", None, "backup_create", details)
        answer = await client.get("/api/v1/audit")

    assert answer.status_code == 200
    listed = answer.json()["entries"][-1]["event_details"]
    assert listed["path"] == "tinkercloud backup create /b\N{REPLACEMENT CHARACTER}"
    assert listed["objects"] == ["b\N{REPLACEMENT CHARACTER}"]
