"""Searching sessions with the SDK: filters, pages, owners."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from tinker import types

from tinkercloud_testing.serving.servers import API_KEY, Server

MODEL = "tiny/llama"


OWNER = "an-owner-of-sessions"


@pytest.fixture(scope="module")
def key(server: Server) -> str:
    """Return the key of an owner of the sessions of this module."""
    return server.new_key(OWNER)


@pytest.fixture(autouse=True)
def experimental() -> Iterator[None]:
    """Allow calls that the SDK calls experimental."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is experimental")
        yield


def a_session(server: Server, key: str, **fields: object) -> str:
    body = {"sdk_version": "test", **fields}
    return str(server.post("create_session", body, key=key).json()["session_id"])


def search(server: Server, key: str, **fields: Any) -> list[str]:
    request = types.SessionSearchRequest(**fields)
    answer = server.rest(key).search_sessions(request).result()
    return [session.session_id for session in answer.sessions]


def test_sessions_are_found_by_name_metadata_project_and_state(server: Server, key: str) -> None:
    white, green, blue = (server.new_project(name, key) for name in ("white", "green", "blue"))
    first = a_session(
        server,
        key,
        display_name="Math with 100% RL",
        user_metadata={"a.b": "1", "c": "2"},
        project_id=white,
    )
    second = a_session(server, key, project_id=green, user_metadata={"a.b": "1"})
    finished = {"reason": {"type": "errored"}, "detail": "out of data"}
    server.post(f"sessions/{second}/finish", finished, key=key)

    both = [green, white]
    found = {
        "two names": search(server, key, project_ids=both),
        "words in any order": search(server, key, display_name="rl MATH"),
        "a literal percent sign": search(server, key, display_name="1%0"),
        "name or id": search(server, key, display_name="math", session_id=second),
        "metadata": search(server, key, user_metadata={"a.b": "1"}),
        "more metadata": search(server, key, user_metadata={"a.b": "1", "c": "2"}),
        "project": search(server, key, project_ids=[green, blue]),
        "active": search(server, key, project_ids=both, statuses=[{"type": "active"}]),
        "errored": search(
            server, key, statuses=[{"type": "client_finished", "reasons": ["errored"]}]
        ),
        "failed": search(server, key, statuses=[{"type": "failed"}]),
    }

    assert found == {
        "two names": [second, first],
        "words in any order": [first],
        "a literal percent sign": [],
        "name or id": [second, first],
        "metadata": [second, first],
        "more metadata": [first],
        "project": [second],
        "active": [first],
        "errored": [second],
        "failed": [],
    }


def test_pages_follow_each_other_and_describe_the_sessions(server: Server, key: str) -> None:
    rest = server.rest(key)
    sessions = [a_session(server, key, display_name="pages") for _ in range(4)]
    model = {"session_id": sessions[3], "model_seq_id": 0, "base_model": MODEL}
    created = server.post("create_model", model, key=key).json()
    save = {"model_id": created["model_id"], "seq_id": 1, "path": "one"}
    saved = server.post("save_weights", save, key=key).json()
    assert "path" in server.result(saved["request_id"], key=key).json()

    pages: list[list[types.SessionSummary]] = []
    cursor = None
    while cursor is not None or not pages:
        request = types.SessionSearchRequest(display_name="pages", limit=2, cursor=cursor)
        answer = rest.search_sessions(request).result()
        pages.append(answer.sessions)
        cursor = answer.next_cursor

    assert [[each.session_id for each in page] for page in pages] == [
        [sessions[3], sessions[2]],
        [sessions[1], sessions[0]],
    ]
    newest = pages[0][0]
    assert newest.owner == OWNER
    assert newest.checkpoints_count == 1
    assert (newest.checkpoint_storage_bytes or 0) > 0
    assert newest.status is not None
    assert newest.status.type == "active"


def test_only_administrators_find_sessions_of_others(server: Server, key: str) -> None:
    mine = a_session(server, key, display_name="private")
    everybody = {"owner": {"type": "accessible"}, "display_name": "private"}
    by_owner = {"owner": {"type": "user", "owner_urns": [OWNER]}, "display_name": "private"}
    other = server.new_key("another-owner-of-sessions")

    for scope in (everybody, by_owner):
        assert search(server, other, **scope) == []
        assert search(server, key, **scope) == [mine]
        assert search(server, API_KEY, **scope) == [mine]
    assert search(server, API_KEY, display_name="private") == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"limit": 201}, "limit"),
        ({"cursor": {"last_created_at": "yesterday", "last_session_id": "x"}}, "last_created_at"),
        ({"statuses": [{"type": "unknown"}]}, "statuses.0.type"),
        ({"display_name": "a\0b"}, "U+0000"),
        ({"user_metadata": {"a\0": "b"}}, "U+0000"),
        ({"user_metadata": {'a"': "b"}}, "such a key"),
    ],
)
def test_an_invalid_search_is_refused(
    fields: dict[str, object], message: str, server: Server
) -> None:
    answer = server.post("sessions/search", fields)

    assert answer.status == 400
    assert message in answer.detail
