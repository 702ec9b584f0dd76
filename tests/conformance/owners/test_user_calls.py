"""Admins see users over the API, create, replace and end their keys, and shut them out."""

import json
import secrets
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest

from tinkercloud_testing.clients.console_browser import events
from tinkercloud_testing.serving.servers import API_KEY, Answer, Server

USERS = "/api/v1/users"
ODD = "a/../b?c#d%2F é <b>"
"""A name that a URL must quote."""


def an_owner() -> str:
    return f"u{secrets.token_hex(4)}"


def keys_of(owner: str) -> str:
    return f"{USERS}/{quote(owner, safe='')}/keys"


def create(server: Server, owner: str, **fields: object) -> dict[str, Any]:
    answer = server.request("POST", keys_of(owner), {"name": "laptop", **fields})
    assert answer.status == 200, answer.detail
    return dict(answer.json())


def user(server: Server, owner: str) -> dict[str, Any]:
    return dict(server.request("GET", keys_of(owner)).json()["user"])


def use(server: Server, key: str) -> int:
    return server.request("GET", "/api/v1/projects", key=key).status


@pytest.mark.parametrize("owner", ["plain", ODD])
def test_a_key_is_made_used_replaced_and_revoked(server: Server, owner: str) -> None:
    owner, began = f"{owner}-{an_owner()}", datetime.now(UTC)
    made = create(server, owner, ttl_seconds=3600)

    whoami = server.request("GET", "/api/v1/auth/apikey/me", key=made["key"]).json()
    assert (whoami["name"], whoami["note"]) == ("laptop", "user")
    assert whoami["details"]["user_details"]["email"] == owner
    left = datetime.fromisoformat(made["expires_at"]) - began
    assert timedelta(minutes=59) < left < timedelta(minutes=61)
    one = f"{keys_of(owner)}/{made['key_id']}"
    second = server.request("POST", f"{one}/rotate", {}).json()
    assert (second["owner"], second["name"], second["role"]) == (owner, "laptop", "user")
    assert (use(server, made["key"]), use(server, second["key"])) == (200, 200)
    assert server.request("DELETE", one).status == 200
    assert (use(server, made["key"]), use(server, second["key"])) == (401, 200)
    assert server.request("DELETE", one).status == 404
    assert server.request("POST", f"{one}/rotate", {}).status == 404

    shown = server.request("GET", keys_of(owner))
    states = [(key["key_id"], key["state"]) for key in shown.json()["keys"]]
    assert states == [(second["key_id"], "valid"), (made["key_id"], "revoked")]
    done = events(server, began, f"key {made['key_id']}")
    assert done == ["key_create", "key_rotate", "key_revoke"]
    for key in (made["key"], second["key"]):
        assert key not in shown.body.decode()
        assert events(server, began, key) == []


def test_a_replaced_key_ends_at_once_without_an_overlap(server: Server) -> None:
    made = create(server, owner := an_owner())
    one = f"{keys_of(owner)}/{made['key_id']}"

    assert server.request("POST", f"{one}/rotate", {"overlap_seconds": 0}).status == 200

    assert use(server, made["key"]) == 401
    assert server.request("GET", keys_of(owner)).json()["keys"][-1]["state"] == "expired"


def test_a_disabled_user_has_no_access_until_it_is_enabled(server: Server) -> None:
    made, began = create(server, owner := an_owner()), datetime.now(UTC)

    assert server.request("POST", f"{USERS}/{owner}/disable").status == 200
    assert (use(server, made["key"]), user(server, owner)["state"]) == (401, "disabled")
    assert server.request("POST", f"{USERS}/{owner}/enable").status == 200
    assert (use(server, made["key"]), user(server, owner)["state"]) == (200, "enabled")
    assert events(server, began, f"user {owner}") == ["user_disable", "user_enable"]


def test_no_admin_is_shut_out_by_itself(server: Server) -> None:
    refused = server.request("POST", f"{USERS}/bootstrap/disable")

    assert (refused.status, "another admin" in refused.detail) == (400, True)
    assert use(server, API_KEY) == 200


def test_a_user_is_listed_with_its_role_runs_and_projects(server: Server) -> None:
    made = create(server, owner := an_owner())
    server.command("users", "set-role", owner, "read-only")
    before = user(server, owner)
    server.command("users", "set-role", owner, "none")
    project = server.new_project("of-a-user", made["key"])
    with server.client(made["key"]) as client:
        client.create_lora_training_client("tiny/llama", rank=4).result()
        found = user(server, owner)

    shown = server.request("GET", keys_of(owner)).json()
    assert (before["role"], before["runs"], before["projects"]) == ("read-only", 0, 0)
    assert (found["role"], found["runs"], found["projects"], found["keys"]) == (None, 1, 1, 1)
    assert (found["tenant"], found["has_login"]) == (None, False)
    assert shown["memberships"] == {project: "admin"}


def test_users_are_found_by_a_part_of_their_names_page_by_page(server: Server) -> None:
    part = an_owner()
    names = [f"{part}%{number}" for number in range(3)]
    for name in names:
        create(server, name)

    def found(query: str) -> tuple[list[str], int]:
        answer = server.request("GET", f"{USERS}?{query}").json()
        return [each["owner"] for each in answer["users"]], answer["total_count"]

    assert found(f"search={part.upper()}") == (names, 3)
    assert found(f"search={part}&limit=1&offset=1") == (names[1:2], 3)
    assert found(f"search={part}%25") == (names, 3)
    assert found(f"search={part}_") == ([], 0)
    for wrong in ("limit=0", "limit=1001", "offset=-1", "offset=x", f"search={'x' * 257}"):
        assert server.request("GET", f"{USERS}?{wrong}").status == 400, wrong


def calls(owner: str, key_id: int) -> list[tuple[str, str, dict[str, object] | None]]:
    one = f"{keys_of(owner)}/{key_id}"
    return [
        ("GET", USERS, None),
        ("GET", keys_of(owner), None),
        ("POST", keys_of(owner), {"name": "stolen", "role": "admin"}),
        ("POST", f"{one}/rotate", {}),
        ("DELETE", one, None),
        ("POST", f"{USERS}/{owner}/disable", None),
        ("POST", f"{USERS}/{owner}/enable", None),
    ]


def test_only_admins_may_send_these_calls(server: Server) -> None:
    victim, began = create(server, owner := an_owner()), datetime.now(UTC)
    limited = create(server, an_owner(), role="admin")
    server.command("users", "set-role", limited["owner"], "user")
    reader = create(server, an_owner(), role="read-only")
    stranger = create(server, an_owner())

    for method, path, body in calls(owner, victim["key_id"]):
        for key in (stranger["key"], reader["key"], limited["key"], victim["key"]):
            refused = server.request(method, path, body, key=key)
            assert refused.status == 403, (method, path)
            assert str(victim["key_id"]) not in refused.detail.replace(path, "")
        assert server.request(method, path, body, key="tml-unknown").status == 401

    assert use(server, victim["key"]) == 200
    assert len(server.request("GET", keys_of(owner)).json()["keys"]) == 1
    assert events(server, began, owner, victim["key"]) == []


@pytest.mark.parametrize("path", ["/", "//api/v1/users", "/api/v1/users/", "/api/v1/users?x=1"])
def test_another_spelling_of_the_path_is_not_for_others(server: Server, path: str) -> None:
    answer = server.request("GET", path, key=server.new_key("stranger"))

    assert answer.status in {403, 404}
    assert "total_count" not in answer.body.decode()


def test_a_key_of_another_user_is_not_found_below_a_user(server: Server) -> None:
    made, other = create(server, an_owner()), create(server, an_owner())
    wrong = f"{keys_of(other['owner'])}/{made['key_id']}"

    answers = [
        server.request("DELETE", wrong),
        server.request("POST", f"{wrong}/rotate", {}),
        server.request("DELETE", f"{keys_of(made['owner'])}/999999999"),
    ]

    assert [answer.status for answer in answers] == [404] * 3
    assert use(server, made["key"]) == 200


@pytest.mark.parametrize(
    ("owner", "fields", "named"),
    [
        ("group:research", {}, "owner 'group:research'"),
        ("a\0b", {}, "owner: "),
        ("x" * 300, {}, "owner: "),
        ("", {}, "owner: "),
        ("fine", {"name": ""}, "name: "),
        ("fine", {"name": "a\0b"}, "name: "),
        ("fine", {"role": "root"}, "role: "),
        ("fine", {"ttl_seconds": 0}, "ttl_seconds: "),
        ("fine", {"ttl_seconds": 1 << 60}, "ttl_seconds: "),
        ("fine", {"ttl_seconds": "60"}, "ttl_seconds: "),
    ],
)
def test_a_key_that_can_not_be_made_names_the_field(
    server: Server, owner: str, fields: dict[str, object], named: str
) -> None:
    refused = server.request("POST", keys_of(owner), {"name": "k", **fields})

    assert (refused.status, named in refused.detail) == (400, True), refused.detail


def test_an_unknown_user_or_number_of_a_key_is_no_failure_of_the_server(server: Server) -> None:
    def status(method: str, path: str) -> Answer:
        return server.request(method, path, {} if method == "POST" else None)

    nobody = f"nobody-{an_owner()}"
    for method, path in (
        ("GET", keys_of(nobody)),
        ("POST", f"{USERS}/{nobody}/disable"),
        ("POST", f"{USERS}/{nobody}/enable"),
        ("DELETE", f"{keys_of(nobody)}/1"),
    ):
        answer = status(method, path)
        assert answer.status == 404, path
        assert nobody in answer.detail
    for number in ("0", "-1", "x", "1.5", str(1 << 31), str(1 << 70)):
        assert status("DELETE", f"{keys_of(nobody)}/{number}").status == 400, number


def test_the_commands_see_what_the_calls_have_made(server: Server) -> None:
    made = create(server, owner := an_owner(), role="read-only")
    server.request("POST", f"{USERS}/{owner}/disable")

    listed = json.loads(server.command("users", "list", "--json"))
    shown = json.loads(server.command("users", "show", owner, "--json"))

    assert [row["state"] for row in listed if row["name"] == owner] == ["disabled"]
    assert [(row["id"], row["role"]) for row in shown] == [(made["key_id"], "read-only")]
