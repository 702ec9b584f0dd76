"""Administrators list owners, limit what all their keys may do, and shut them out."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server


def a_key(server: Server, name: str, *options: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(server.command("keys", "create", name, *options, "--json"))
    return made


def listed(server: Server) -> dict[str, dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(server.command("users", "list", "--json"))
    return {row["name"]: row for row in rows}


def role_of(server: Server, key: str) -> str:
    """Return what a key may do at the moment."""
    return str(server.request("GET", "/api/v1/auth/apikey/me", key=key).json()["note"])


@pytest.mark.long
def test_all_owners_are_listed_with_their_valid_keys_projects_and_last_use(server: Server) -> None:
    used, revoked = (a_key(server, name, "--owner", "with-keys") for name in ("used", "revoked"))
    server.command("keys", "revoke", "--yes", str(revoked["id"]))
    project = server.new_project("of-members", used["key"])
    path = f"/api/v1/projects/{project}/members/only-a-member"
    assert server.request("PUT", path, {"role": "viewer"}, key=used["key"]).status == 200
    server.command("users", "create", "only-an-entry", "--role", "read-only")

    wait_until(lambda: listed(server)["with-keys"]["last used"] != "", "the record of the use")
    rows = listed(server)
    shown = json.loads(server.command("users", "show", "with-keys", "--json"))

    counts = {
        name: (rows[name]["role"], rows[name]["keys"], rows[name]["projects"])
        for name in ("with-keys", "only-a-member", "only-an-entry")
    }
    assert counts == {
        "with-keys": ("", 1, 1),
        "only-a-member": ("", 0, 1),
        "only-an-entry": ("read-only", 0, 0),
    }
    assert [(row["kind"], row["id"], row["role"]) for row in shown] == [
        ("key", used["id"], "user"),
        ("key", revoked["id"], "user"),
        ("project", project, "admin"),
    ]
    assert [row["last used"] != "" for row in shown[:2]] == [True, False]
    assert [row["ends"] != "" for row in shown[:2]] == [False, True]


@pytest.mark.long
def test_a_limit_that_was_set_in_advance_holds_for_keys_that_are_made_later(
    server: Server,
) -> None:
    server.command("users", "create", "in-advance", "--role", "read-only")
    user = a_key(server, "in-advance")["key"]
    admin = a_key(server, "in-advance", "--role", "admin")["key"]

    roles = [(role_of(server, user), role_of(server, admin))]
    created = server.post("create_session", {"sdk_version": "t"}, key=admin).status
    for limit in ("user", "admin", "none"):
        server.command("users", "set-role", "in-advance", limit)
        roles.append((role_of(server, user), role_of(server, admin)))

    assert created == 403
    # A limit never gives a key more rights than its own.
    assert roles == [
        ("read-only", "read-only"),
        ("user", "user"),
        ("user", "admin"),
        ("user", "admin"),
    ]


@pytest.mark.long
def test_what_a_disabled_owner_has_made_stays(server: Server) -> None:
    key = a_key(server, "on-leave")["key"]
    with server.client(key) as client:
        training = client.create_lora_training_client("tiny/llama", rank=4).result()
        path = training.save_state("kept").result().path
    said = server.command("users", "disable", "on-leave", "--yes")
    run = f"/api/v1/training_runs/{training.model_id}"
    seen = [server.request("GET", run).status, server.request("GET", run, key=key).status]
    keys = [listed(server)["on-leave"]["keys"]]
    server.command("users", "enable", "on-leave")

    assert said == "on-leave is disabled: no server accepts its keys any more\n"
    keys.append(listed(server)["on-leave"]["keys"])
    assert seen == [200, 401]
    assert keys == [0, 1]
    checkpoints = server.rest(key).list_checkpoints(training.model_id).result().checkpoints
    assert [each.tinker_path for each in checkpoints] == [path]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "nobody"), "no owner is named 'nobody'"),
        (("disable", "nobody", "--yes"), "no owner is named 'nobody'"),
        (("enable", "nobody"), "no owner is named 'nobody'"),
        (("set-role", "nobody", "user"), "no owner is named 'nobody'"),
        (("set-role", "nobody", "root"), "role: expected one of user, admin, read-only or none"),
    ],
)
def test_a_command_for_an_unknown_owner_or_role_says_so(
    server: Server, arguments: tuple[str, ...], message: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tinkercloud_api", "users", *arguments],
        env=server.environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert message in " ".join(done.stderr.split())
