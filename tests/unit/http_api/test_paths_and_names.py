"""Wrong methods, first guesses at URLs, models for Anthropic's clients, and names of requests."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from structlog.testing import capture_logs

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.routes.requests import call
from tinkercloud_api.serve.api_app import Application
from tinkercloud_protocol.wire import request_ids, routes
from tinkercloud_testing.serving.providers import OneHead

KEY = "tml-a-valid-key-of-these-tests"


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of a whole server, which runs in this process."""
    app = Application(Settings(state_dir=tmp_path, bootstrap_key=KEY), OneHead())
    received: asyncio.Queue[Any] = asyncio.Queue()
    sent: asyncio.Queue[Any] = asyncio.Queue()
    received.put_nowait({"type": "lifespan.startup"})
    running = asyncio.create_task(app({"type": "lifespan"}, received.get, sent.put))
    assert (await sent.get())["type"] == "lifespan.startup.complete"
    transport, headers = httpx.ASGITransport(app=app), {"x-api-key": KEY}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://t", headers=headers
    ) as client:
        yield client
    received.put_nowait({"type": "lifespan.shutdown"})
    await running


async def test_a_wrong_method_is_405_and_the_right_ones_are_named(
    client: httpx.AsyncClient,
) -> None:
    for method, path, allowed in (
        ("GET", routes.FORWARD_BACKWARD, "POST"),
        ("POST", "/api/v1/training_runs", "GET"),
        ("DELETE", "/api/v1/create_session", "POST"),
        ("OPTIONS", "/healthz", "GET"),
        ("PUT", "/openapi.json", "GET, HEAD"),
        ("GET", routes.OPENAI_CHAT, "POST"),
        ("POST", routes.OPENAI_MODELS, "GET"),
        ("DELETE", routes.ANTHROPIC_MODELS + "/m", "GET"),
        ("OPTIONS", routes.ANTHROPIC_MESSAGES, "POST"),
        ("GET", routes.OPENAI_SESSIONS + "/s:sample:0~a/v1/chat/completions", "POST"),
    ):
        answer = await client.request(method, path)

        assert (path, answer.status_code) == (path, 405)
        assert answer.headers["allow"] == allowed
        assert f"{method} {path} is not supported by this server" in answer.text
    several = await client.put("/api/v1/projects/p")
    assert {"DELETE", "GET"} <= set(several.headers["allow"].split(", "))


async def test_browsers_that_open_the_address_of_the_server_are_led_to_the_console(
    client: httpx.AsyncClient,
) -> None:
    for path in ("/", "/ui", "/docs"):
        browser = await client.get(path, headers={"accept": "text/html,*/*;q=0.8"})
        other = await client.get(path)

        assert (browser.status_code, browser.headers.get("location")) == (303, "/console")
        assert other.status_code == 404
        assert "/console is for browsers" in other.json()["detail"]


async def test_clients_of_openai_with_a_wrong_base_url_read_the_right_one(
    client: httpx.AsyncClient,
) -> None:
    calls = ("chat/completions", "completions", "responses", "embeddings", "messages")
    for base, end in itertools.product(("", "/openai/v1", "/api/v1"), calls):
        answer = await client.post(f"{base}/{end}", json={"model": "m"})

        assert answer.status_code == 404
        assert "base_url must end in /oai/api/v1" in answer.json()["detail"]
        assert answer.json()["error"]["message"] == answer.json()["detail"]
        assert answer.json()["error"]["code"] == "not_found"
    assert "error" in (await client.get("/api/v1/models")).json()
    assert "error" not in (await client.get("/api/v1/unknown")).json()


async def test_v1_is_served_like_the_longer_paths_of_each_kind_of_client(
    client: httpx.AsyncClient,
) -> None:
    for short, path in (
        ("/v1/chat/completions", routes.OPENAI_CHAT),
        ("/v1/completions", routes.OPENAI_COMPLETIONS),
        ("/v1/messages", routes.ANTHROPIC_MESSAGES),
        ("/v1/messages/count_tokens", f"{routes.ANTHROPIC_MESSAGES}/count_tokens"),
        ("/v1/unknown", f"{routes.OPENAI}/unknown"),
    ):
        answers = [await client.post(each, json={"model": "unknown"}) for each in (short, path)]

        assert answers[0].status_code == answers[1].status_code == 404
        assert answers[0].json() == answers[1].json()
        assert answers[0].headers.keys() == answers[1].headers.keys()
    anthropic = {"anthropic-version": "2023-06-01"}
    for headers, path in (({}, routes.OPENAI_MODELS), (anthropic, routes.ANTHROPIC_MODELS)):
        listed = await client.get("/v1/models", headers=headers)
        assert listed.status_code == 200
        assert listed.json() == (await client.get(path)).json()
    without_key = {"x-api-key": "", "authorization": ""}
    assert (await client.get("/v1/models", headers=without_key)).status_code == 401


async def test_a_wrong_base_url_below_the_prefixes_is_named_with_the_right_ones(
    client: httpx.AsyncClient,
) -> None:
    for path in (
        *("/oai/chat/completions", "/oai/api/chat/completions", "/oai/v1/chat/completions"),
        *(f"{routes.OPENAI_CHAT}/chat/completions", f"{routes.OPENAI}/v1/chat/completions"),
        *("/anthropic/v1/messages", f"{routes.ANTHROPIC}/v1/v1/messages"),
    ):
        said = (await client.post(path, json={"model": "m"})).json()["error"]["message"]

        assert "base_url must end in /oai/api/v1 (OpenAI) or /anthropic/api (Anthropic" in said


async def test_first_guesses_at_urls_name_the_right_one(client: httpx.AsyncClient) -> None:
    for method, path, words in (
        ("GET", "/login", "TINKERCLOUD_OIDC"),
        ("GET", "/metrics", "TINKERCLOUD_METRICS_PORT"),
        ("GET", "/docs", "/openapi.json"),
        ("GET", "/", "TINKER_BASE_URL"),
        ("GET", "/", "OPENAI_BASE_URL is its address with /oai/api/v1"),
        ("GET", "/v1/api/v1/get_server_capabilities", "the server's address without a path"),
    ):
        answer = await client.request(method, path)

        assert answer.status_code == 404
        assert words in answer.json()["detail"]


@pytest.mark.parametrize(
    "limit", ["00000000" + "5" * 4400, "000000005000", "1001", "0", "٣", "-1", ""]
)
async def test_a_limit_of_models_out_of_range_is_named(
    client: httpx.AsyncClient, limit: str
) -> None:
    answer = await client.get(routes.ANTHROPIC_MODELS, params={"limit": limit, "x": ""})

    if limit:
        assert answer.status_code == 400
        assert "limit: must be 1 to 1000" in answer.text
    else:
        assert answer.status_code == 200


async def test_models_have_the_schema_of_anthropic(client: httpx.AsyncClient) -> None:
    listed = (await client.get(routes.ANTHROPIC_MODELS)).json()
    [model] = listed["data"]
    one = (await client.get(f"{routes.ANTHROPIC_MODELS}/{model['id']}")).json()
    openai = (await client.get(routes.OPENAI_MODELS)).json()["data"]

    assert one == model
    assert model["type"] == "model"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", model["created_at"])
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (
        *(model["id"], model["id"]),
        False,
    )
    assert openai[0]["id"] == model["id"]
    assert openai[0]["created"] > 1.7e9


async def test_wrong_pages_of_models_are_refused_by_name(client: httpx.AsyncClient) -> None:
    for query in ("limit=0", "limit=x", "limit=1001", "after_id=unknown"):
        answer = await client.get(f"{routes.ANTHROPIC_MODELS}?{query}")

        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(query.partition("=")[0])


async def test_an_unknown_model_is_an_error_of_the_field_model(client: httpx.AsyncClient) -> None:
    unknown = "tinker://s:train:0/sampler_weights/a"
    for name in ("unknown", f"unknown;{unknown}", unknown, "tinker://x", "s:train:0"):
        answer = await client.post(routes.OPENAI_CHAT, json={"model": name})
        error: dict[str, Any] = answer.json()["error"]

        assert answer.status_code in {400, 404}
        assert error["param"] == "model"
        assert error["code"] == ("model_not_found" if answer.status_code == 404 else None)


async def test_a_wrong_model_is_quoted_with_the_names_and_forms_that_are_right(
    client: httpx.AsyncClient,
) -> None:
    [served] = [each["id"] for each in (await client.get(routes.OPENAI_MODELS)).json()["data"]]
    for path, name, words in (
        (routes.OPENAI_CHAT, "unknown", f"served: {served!r}; GET {routes.OPENAI_MODELS} "),
        (routes.ANTHROPIC_MESSAGES, "unknown", f"GET {routes.ANTHROPIC_MODELS} "),
        (routes.OPENAI_CHAT, "tinker://abc/a", "'tinker://abc/a'"),
        (routes.OPENAI_CHAT, "tinker://abc/a", "tinker://RUN/sampler_weights/NAME"),
        (routes.OPENAI_CHAT, "tinker://abc/sampler_weights/a", "'tinker://abc/sampler_weights/a'"),
    ):
        answer = await client.post(path, json={"model": name})

        assert words in answer.json()["error"]["message"]


async def test_a_model_that_is_not_loaded_yet_is_503_with_what_to_do(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(OneHead, "acquire", lambda *_: asyncio.sleep(60))

    answer = await client.post(routes.OPENAI_CHAT, json={"model": "tiny"})

    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no reason; send it again"


async def test_a_malformed_recorded_session_is_unknown(client: httpx.AsyncClient) -> None:
    for below in ("", "/v1/models", "/datums"):
        answer = await client.get(f"{routes.OPENAI_SESSIONS}/nope{below}")

        assert answer.status_code == 404
        assert "recorded session 'nope' is unknown" in answer.json()["error"]["message"]


async def test_calls_that_clients_of_openai_often_make_are_refused_with_what_to_do(
    client: httpx.AsyncClient,
) -> None:
    for path, instead in (("responses", routes.OPENAI_CHAT), ("embeddings", "no embeddings")):
        for below in ("", "/some-id"):
            answer = await client.post(f"{routes.OPENAI}/{path}{below}", json={"model": "m"})
            error: dict[str, Any] = answer.json()["error"]

            assert (answer.status_code, error["code"]) == (404, "not_found")
            assert f"{path}{below} is not supported by this server; " in error["message"]
            assert instead in error["message"]


async def test_every_answer_names_its_request(client: httpx.AsyncClient) -> None:
    for path, key, status in (
        (routes.OPENAI_MODELS, KEY, 200),
        (routes.ANTHROPIC_MODELS, KEY, 200),
        (routes.ANTHROPIC_MODELS, "wrong", 401),
        ("/livez", KEY, 200),
        ("/api/v1/nothing", KEY, 404),
    ):
        answer = await client.get(path, headers={"x-api-key": key})
        name = answer.headers[request_ids.HEADER]

        assert answer.status_code == status
        assert re.fullmatch(r"req_[0-9a-f]{32}", name)
        is_anthropic = path.startswith(routes.ANTHROPIC)
        assert answer.headers.get(request_ids.ANTHROPIC_HEADER) == (name if is_anthropic else None)
    kept = await client.get("/livez", headers={request_ids.HEADER: "my-id_1.2"})
    assert kept.headers[request_ids.HEADER] == "my-id_1.2"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "\xe9", "a\nb", "a\n"])
def test_a_name_of_the_client_with_other_characters_is_ignored(given: str) -> None:
    assert request_ids.name_of(given).startswith("req_")


def test_log_lines_name_the_request() -> None:
    processors = [structlog.contextvars.merge_contextvars]
    with (
        structlog.contextvars.bound_contextvars(**{request_ids.LOG_FIELD: "req_1"}),
        capture_logs(processors=processors) as lines,
    ):
        structlog.get_logger().info("said")

    assert lines[0][request_ids.LOG_FIELD] == "req_1"
