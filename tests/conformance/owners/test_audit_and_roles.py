"""Who changed what is recorded, keys have roles and successors, and usage is billed as counted."""

import csv
import io
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server, a_server

MODEL = "tiny/llama"
PROMPT = types.ModelInput.from_ints([5, 6, 7])


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Server]:
    """Run a server whose log no other test changes, and whose clients use access tokens."""
    settings = {
        "TINKERCLOUD_ACCESS_TOKENS": "true",
        "TINKERCLOUD_TENANTS": json.dumps({"research": {"owners": ["zoe"]}}),
    }
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: model_folder}, settings) as running:
        yield running


def a_key(server: Server, name: str, *options: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(server.command("keys", "create", name, *options, "--json"))
    return made


def test_changes_are_recorded_with_their_outcome(own_server: Server) -> None:
    ann, bob = (own_server.new_key(name) for name in ("ann", "bob"))
    admin = tinker.AdminClient(base_url=own_server.url, api_key=own_server_admin(own_server))
    with own_server.client(ann) as client:
        training = client.create_lora_training_client(MODEL, rank=4).result()
        step(training)
        path = training.save_state("kept").result().path
    copied = own_server.rest(ann).copy_weights(path, own_server.new_project("copies", ann)).result()
    own_server.rest(ann).delete_checkpoint_from_tinker_path(path).result()
    run, _, name = path.removeprefix("tinker://").partition("/")
    stolen = own_server.request(
        "DELETE", f"/api/v1/training_runs/{run}/checkpoints/{name}", key=bob
    )

    theirs = tinker.AdminClient(base_url=own_server.url, api_key=ann).get_audit_log().result()
    everyone = admin.get_audit_log("checkpoints").result()

    assert stolen.status == 404
    events = [(entry.event, entry.event_details["status"]) for entry in theirs.entries]
    assert events[:3] == [("session_create", 200), ("model_create", 200), ("checkpoint_write", 200)]
    assert ("checkpoint_delete", 200) in events
    assert {entry.event_details["owner"] for entry in theirs.entries} == {"ann"}
    made = {entry.event: entry.event_details.get("objects") for entry in theirs.entries}
    assert made["model_create"] == made["checkpoint_write"] == [training.model_id]
    assert made["session_create"] == [training.holder.get_session_id()]
    assert made["checkpoint_delete"] == [path]
    assert made["checkpoint_copy"] == [copied]
    attempts = [
        (entry.event_details["owner"], entry.event_details["status"])
        for entry in everyone.entries
        if entry.event == "checkpoint_delete"
    ]
    assert attempts == [("ann", 200), ("bob", 404)]
    assert "checkpoint_delete" in own_server.command(
        "audit", "--api-key", ann, "--base-url", own_server.url
    )


@pytest.mark.long
def test_commands_on_the_server_are_recorded_without_secrets(own_server: Server) -> None:
    made = a_key(own_server, "lead", "--role", "user", "--expires", "30d")
    own_server.command("keys", "rotate", str(made["id"]))
    own_server.command("keys", "revoke", "--yes", str(made["id"]))
    own_server.command("users", "create", "dan", "--role", "user")
    own_server.command("users", "set-role", "dan", "read-only")
    own_server.command("users", "disable", "dan", "--yes")
    own_server.command("users", "enable", "dan")
    with pytest.raises(AssertionError):
        own_server.command("keys", "revoke", "--yes", "999999")
    admin = own_server_admin(own_server)

    log = own_server.request("GET", "/api/v1/audit", key=admin)
    entries = [
        (entry["event"], entry["event_details"])
        for entry in log.json()["entries"]
        if entry["event_details"]["owner"].startswith("command:")
    ]

    since = [details["path"] for _, details in entries].index(
        "tinkercloud keys create lead --owner lead --role user --expires 30d"
    )
    assert [(event, details["status"]) for event, details in entries[since:]] == [
        ("key_create", "done"),
        ("key_rotate", "done"),
        ("key_revoke", "done"),
        ("user_create", "done"),
        ("user_role_set", "done"),
        ("user_disable", "done"),
        ("user_enable", "done"),
        ("key_revoke", "refused"),
        ("key_create", "done"),
    ]
    assert entries[since + 1][1]["path"].endswith(" --overlap 1d")
    assert entries[since][1]["objects"] == [f"key {made['id']}"]
    assert made["key"] not in log.body.decode()
    shown = own_server.command("audit", "--api-key", admin, "--base-url", own_server.url)
    assert "tinkercloud users disable dan" in shown


def own_server_admin(server: Server) -> str:
    return str(a_key(server, "auditor", "--role", "admin")["key"])


def exported(server: Server, *options: str) -> list[dict[str, Any]]:
    """Return the entries that an administrator exports."""
    admin = own_server_admin(server)
    call = ("audit", "--api-key", admin, "--base-url", server.url, "--json", *options)
    return [json.loads(line) for line in server.command(*call).splitlines()]


@pytest.mark.long
def test_acts_of_the_server_and_changes_of_rights_name_their_objects(
    own_server: Server, tmp_path: Path
) -> None:
    gil = own_server.new_key("gil")
    project = own_server.request("POST", "/api/v1/projects", {"name": "p"}, key=gil).json()
    member = f"/api/v1/projects/{project['project_id']}/members/hal"
    own_server.request("PUT", member, {"role": "viewer"}, key=gil)
    own_server.request("DELETE", "/api/v1/auth/apikey/me", key=gil)
    own_server.command("backup", "create", str(tmp_path / "copy.tar"))

    entries = exported(own_server)

    found = {entry["event"]: entry for entry in entries}
    first = next(entry for entry in entries if entry["event"] == "key_create")
    assert (first["owner"], first["path"]) == ("server:", "setting bootstrap_key")
    assert found["quota_set"]["value"]["research"]["owners"] == ["zoe"]
    assert found["quota_set"]["objects"] == ["tenant research"]
    assert found["project_grant_set"]["objects"] == ["viewer hal"]
    assert found["project_grant_set"]["project_ids"] == [project["project_id"]]
    assert found["key_revoke"]["objects"] == [f"key {found['key_revoke']['key_id']}"]
    assert found["backup_create"]["owner"].startswith("command:")
    assert found["backup_create"]["status"] == "done"


@pytest.mark.long
def test_the_log_is_exported_and_its_chain_is_checked(own_server: Server, tmp_path: Path) -> None:
    entries = exported(own_server)
    admin = own_server_admin(own_server)
    call = ("audit", "--api-key", admin, "--base-url", own_server.url)
    sheet = list(csv.DictReader(io.StringIO(own_server.command(*call, "--csv"))))
    verified = json.loads(own_server.command("audit", "verify", "--json"))

    assert [int(row["number"]) for row in sheet[: len(entries)]] == [e["number"] for e in entries]
    assert sheet[0]["hash"] == entries[0]["hash"]
    assert exported(own_server, "--since", "2000-01-01", "--until", "2001-01-01") == []
    assert len(exported(own_server, "--since", "2000-01-01")) > len(entries)
    for bound in ("since=0001-01-01T00:00:00%2B14:00", "until=9999-12-31T23:59:59-12:00"):
        assert own_server.request("GET", f"/api/v1/audit?{bound}", key=admin).status == 200
    assert own_server.request("GET", "/api/v1/audit?day=9999-12-31", key=admin).status == 200
    assert verified["faults"] == []
    own_server.command("audit", "verify", "--contains", verified["newest"])
    log = tmp_path / "audit.jsonl"
    log.write_text(own_server.command("audit", "export"))
    contained = ("audit", "verify", "--contains", verified["newest"])
    own_server.command(*contained, str(log))
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    with pytest.raises(AssertionError, match="is not in the log, which ends before it"):
        own_server.command(*contained, str(log))

    changed = "UPDATE audit_log SET owner = ? WHERE id = 1"
    with closing(sqlite3.connect(own_server.state_dir / "catalog.db")) as catalog, catalog:
        catalog.execute(changed, ("mallory",))
    with pytest.raises(AssertionError, match="broken: entry 1 "):
        own_server.command("audit", "verify")
    with closing(sqlite3.connect(own_server.state_dir / "catalog.db")) as catalog, catalog:
        catalog.execute(changed, (entries[0]["owner"],))
    own_server.command("audit", "verify")


def test_a_read_only_key_reads_and_changes_nothing(own_server: Server) -> None:
    with own_server.client(own_server.new_key("carol")) as client:
        training = client.create_lora_training_client(MODEL, rank=4).result()
        path = training.save_state("kept").result().path
    reader = str(a_key(own_server, "reader", "--owner", "carol", "--role", "read-only")["key"])
    rest = own_server.rest(reader)

    assert rest.list_checkpoints(training.model_id).result().checkpoints
    assert rest.get_weights_info_by_tinker_path(path).result().base_model == MODEL
    refused = [
        own_server.post(call, {}, key=reader).status
        for call in ("create_session", "asample", "forward_backward", "copy_weights", "nonsense")
    ]
    run, _, name = path.removeprefix("tinker://").partition("/")
    deleted = own_server.request(
        "DELETE", f"/api/v1/training_runs/{run}/checkpoints/{name}", key=reader
    )

    assert refused == [403] * 5
    assert deleted.status == 403
    assert "is read-only" in deleted.detail
    assert "tinkercloud users set-role carol none" in deleted.detail


def test_an_access_token_stands_for_its_key(own_server: Server) -> None:
    made = a_key(own_server, "frank@example.com")
    rest = own_server.rest(str(made["key"]))
    token = own_server.post("auth/token", {}, key=made["key"]).json()["jwt"]
    head, claims, _ = token.split(".")

    who = rest.whoami().result()
    assert (who.user_urn, who.email) == ("frank@example.com", "frank@example.com")
    assert own_server.request("GET", "/api/v1/auth/apikey/me", key=token).json()["name"] == (
        "frank@example.com"
    )
    for forged in (f"{head}.{claims}.AAAA", f"{head}.{claims}.", "eyJhbGciOiJub25lIn0.e30."):
        refused = own_server.request("GET", "/api/v1/sessions", key=forged)
        assert refused.status == 401
        assert 'error="invalid_token"' in refused.headers["www-authenticate"]
    own_server.command("keys", "revoke", "--yes", str(made["id"]))
    assert own_server.request("GET", "/api/v1/sessions", key=token).status == 401


def test_a_key_and_its_successor_are_valid_until_the_overlap_ends(own_server: Server) -> None:
    old = a_key(own_server, "dave")
    new = json.loads(
        own_server.command("keys", "rotate", str(old["id"]), "--overlap", "1h", "--json")
    )
    newest = json.loads(
        own_server.command("keys", "rotate", str(new["id"]), "--overlap", "1s", "--json")
    )

    assert (new["owner"], newest["owner"]) == ("dave", "dave")
    assert own_server.request("GET", "/api/v1/sessions", key=old["key"]).status == 200
    assert own_server.request("GET", "/api/v1/sessions", key=newest["key"]).status == 200
    wait_until(
        lambda: own_server.request("GET", "/api/v1/sessions", key=new["key"]).status == 401,
        "the end of the overlap",
    )


def test_usage_and_storage_are_billed_as_they_were_counted(own_server: Server) -> None:
    eve = own_server.new_key("eve")
    admin = tinker.AdminClient(base_url=own_server.url, api_key=eve)
    with own_server.client(eve) as client:
        training = client.create_lora_training_client(MODEL, rank=4).result()
        step(training)
        training.save_state("kept").result()
        sampler = client.create_sampling_client(base_model=MODEL).result()
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=5, stop=[])).result()
        session = client.holder.get_session_id()
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    since, until = hour - timedelta(hours=1), hour + timedelta(hours=2)

    def tokens() -> dict[str, int]:
        usage = admin.get_billing_usage(since, until).result()
        counts: dict[str, int] = {}
        for event in usage.data:
            assert event.session_id == session
            info: Any = event.event_info
            counts[info.type] = counts.get(info.type, 0) + info.token_count
        return counts

    wait_until(lambda: tokens().get("sampling_sample") == 5, "the report of the head")
    storage = admin.get_current_checkpoint_storage_usage().result()

    assert tokens()["training"] > 0
    assert tokens()["sampling_prefill"] == 3
    assert [(item.checkpoint_count, item.user_name) for item in storage.data] == [(1, "eve")]
    assert storage.data[0].size_bytes > 0
    with pytest.raises(tinker.BadRequestError, match="at most 14 days"):
        admin.get_billing_usage(hour - timedelta(days=30), hour).result()
