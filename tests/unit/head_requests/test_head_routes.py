"""The routes of a head: who may call them, and which paths they serve."""

from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from tinkercloud_protocol.wire import recorded_paths, routes
from tinkercloud_testing.serving.served_heads import TOKEN, ServedHead, a_served_head
from tinkercloud_worker.head.serve.head_app import ROUTES

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHAT = orjson.dumps(
    {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
)
SESSION, OTHER = "s:sample:0", "s:sample:1"


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[ServedHead]:
    async with a_served_head(tmp_path, chat_template=TEMPLATE) as head:
        await head.sampler(SESSION)
        await head.sampler(OTHER)
        yield head


async def test_routes_that_need_the_token_reject_callers_without_it(head: ServedHead) -> None:
    statuses = {}
    for route in ROUTES:
        url = head.url + route.path.replace("{id}", f"{SESSION}~x")
        async with head.client.request(route.method, url) as answer:
            statuses[route.method, route.path] = answer.status

    unauthenticated = {route for route, status in statuses.items() if status != 401}
    assert unauthenticated == {("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/metrics")}
    assert len(statuses) == len(ROUTES)


async def test_routes_are_served_to_callers_with_the_token(head: ServedHead) -> None:
    statuses, unknown = set(), {}
    token = {routes.HEAD_TOKEN_HEADER: TOKEN, routes.TARGET_HEADER: SESSION}
    # The route that suspends the head comes last.
    for route in sorted(ROUTES, key=lambda route: route.path == routes.HEAD_SUSPEND):
        url = head.url + route.path.replace("{id}", f"{SESSION}~x")
        sent = head.client.request(route.method, url, data=b"{}", headers=token)
        async with sent as answer:
            statuses.add(answer.status)
            # The lease has no end.
            said = "" if answer.ok else await answer.text()
        if answer.status in {401, 405} or "does not serve" in said:
            unknown[route.method, route.path] = answer.status, said

    assert unknown == {}
    assert 200 in statuses


async def test_unknown_paths_and_methods_are_rejected_in_the_shape_of_their_clients(
    head: ServedHead,
) -> None:
    unknown = await head.send("/oai/sessions/x~y/turns", b"", SESSION)
    wrong = await head.send("/models/x", b"", SESSION, method="PATCH")

    assert unknown.status == 404
    assert orjson.loads(unknown.body)["error"]["code"] == "not_found"
    assert wrong.status == 405
    assert "PUT" in wrong.detail
    assert "DELETE" in wrong.detail


async def test_a_recorded_session_is_served_by_its_own_sampling_session_only(
    head: ServedHead,
) -> None:
    created = await head.send(routes.OPENAI_SESSIONS, orjson.dumps({"model": "tiny"}), SESSION)
    base = f"{routes.OPENAI_SESSIONS}/{orjson.loads(created.body)['id']}"

    said = await head.send(f"{base}/{recorded_paths.CHAT}", CHAT, SESSION)
    turns = await head.send(f"{base}/{recorded_paths.DATUMS}", b"", SESSION)
    of_other = await head.send(f"{base}/{recorded_paths.DATUMS}", b"", OTHER)
    deleted = await head.send(f"{base}/{recorded_paths.DELETE}", b"", SESSION)
    gone = await head.send(f"{base}/{recorded_paths.DATUMS}", b"", SESSION)

    assert said.status == turns.status == deleted.status == 200
    assert orjson.loads(turns.body)["num_turns"] == 1
    assert of_other.status == gone.status == 404


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/oai/sessions/a~b", ("a~b", "a", "")),
        ("/oai/sessions/a~b/", ("a~b", "a", "")),
        ("/oai/sessions/a~b~c/datums", ("a~b~c", "a", "datums")),
        ("/oai/sessions/a~b/v1/chat/completions", ("a~b", "a", "v1/chat/completions")),
        ("/oai/sessions/a~b\n/x/\n", ("a~b\n", "a", "x/\n")),
        ("/oai/sessions/ab/datums", None),
        ("/oai/sessions/ab/da~tums", None),
        ("/oai/sessions", None),
        ("/oai/sessionsa~b", None),
        ("/oai/sessions/", None),
    ],
)
def test_paths_of_recorded_sessions_have_a_name_a_sampling_session_and_an_action(
    path: str, parts: tuple[str, str, str] | None
) -> None:
    found = recorded_paths.parse(path)

    assert (found and (found.name, found.sampler_id, found.action)) == parts
