"""Owners share a project: members use each other's runs by role, and nobody else sees them."""

import json
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tinkercloud_testing.clients.sdk_clients import sampling_session_of
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS, wait_until
from tinkercloud_testing.serving.servers import Answer, Server, a_server

MODEL = "tiny/llama"
PROMPT = types.ModelInput.from_ints([5, 6, 7])
Call = tuple[str, str, Mapping[str, Any] | None]


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Server]:
    """Run a server whose owners and projects no other test changes."""
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: model_folder}) as running:
        yield running


@dataclass
class Team:
    """A project with an admin, a member and a viewer, and the admin's run in it."""

    server: Server
    keys: dict[str, str]
    run: str
    session: str
    sampler: str

    def send(self, who: str, call: Call) -> Answer:
        method, path, body = call
        return self.server.request(method, f"/api/v1/{path}", body, key=self.keys[who])

    def service(self, who: str, **options: Any) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.server.url, api_key=self.keys[who], **options)

    def set_member(self, who: str, role: str) -> None:
        call = ("PUT", f"projects/vision/members/{who}", {"role": role})
        assert self.send("ann", call).status == 200

    def command(self, *arguments: str, who: str = "ann") -> str:
        options = ("--api-key", self.keys[who], "--base-url", self.server.url)
        return self.server.command("projects", *arguments, *options)

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/weights/kept"


@pytest.fixture(scope="module")
def team(own_server: Server) -> Iterator[Team]:
    names = ("ann", "bob", "vic", "eve")
    keys = {name: own_server.new_key(name) for name in names}
    options = ("--api-key", keys["ann"], "--base-url", own_server.url)
    own_server.command("projects", "create", "Vision", "--id", "vision", *options)
    added = own_server.command("projects", "set-member", "vision", "bob", "member", *options)
    assert added == "role of bob in vision: member\n"
    own_server.command("projects", "set-member", "vision", "vic", "viewer", *options)
    with tinker.ServiceClient(
        base_url=own_server.url, api_key=keys["ann"], project_id="vision"
    ) as service:
        training = service.create_lora_training_client(MODEL, rank=4).result()
        step(training)
        training.save_state("kept").result()
        sampler = training.save_weights_and_get_sampling_client().result()
        yield Team(
            own_server,
            keys,
            training.model_id,
            training.holder.get_session_id(),
            sampling_session_of(sampler),
        )


def reads(team: Team) -> dict[str, Call]:
    run, checkpoint = f"training_runs/{team.run}", f"training_runs/{team.run}/checkpoints"
    return {
        "info": ("POST", "get_info", {"model_id": team.run}),
        "result": ("POST", "retrieve_future", {"request_id": f"{team.run}:0"}),
        "state": ("GET", f"retrieve_future/{team.run}:0", None),
        "sampler": ("GET", f"samplers/{team.sampler}", None),
        "run": ("GET", run, None),
        "checkpoints": ("GET", checkpoint, None),
        "weights": ("POST", "weights_info", {"tinker_path": team.path}),
        "session": ("GET", f"sessions/{team.session}", None),
        "usage": ("GET", f"session_usage/{team.session}", None),
        "trace": ("GET", f"sessions/{team.session}/trace_export", None),
        "project": ("GET", "projects/vision", None),
        "runs of project": ("GET", "training_runs?project_id=vision", None),
        "search": ("POST", "sessions/search", {"project_ids": ["vision"]}),
        "find": ("POST", "checkpoints/search", {"project_ids": ["vision"]}),
        "storage": ("GET", "billing/usage/checkpoints/current?project_id=vision", None),
    }


def changes(team: Team) -> dict[str, Call]:
    """Return calls that change the project; none of them may succeed, so that all can be sent."""
    checkpoint = f"training_runs/{team.run}/checkpoints/weights/kept"
    tokens = {"type": "encoded_text", "tokens": [1, 2]}
    sample = {"sampling_session_id": team.sampler, "seq_id": 99, "prompt": {"chunks": [tokens]}}
    batch = {"data": [{"model_input": {"tokens": [1]}, "loss_fn_inputs": {}}]}
    model = {"model_seq_id": 7, "base_model": MODEL, "lora_config": {"rank": 4}}
    load = {"model_seq_id": 8, "path": team.path, "optimizer": False}
    copy = {"source_path": team.path}
    named = {"base_model": MODEL, "adapter_config": {}, "size_bytes": 1, "name": "x"}
    return {
        "pass": ("POST", "forward_backward", {"model_id": team.run, "seq_id": 50, **batch}),
        "step": ("POST", "optim_step", {"model_id": team.run, "seq_id": 50, "adam_params": {}}),
        "save": ("POST", "save_weights", {"model_id": team.run, "seq_id": 50, "path": "x"}),
        "export": ("POST", "save_weights_external", {"model_id": team.run, "seq_id": 50}),
        "load in place": ("POST", "load_weights", {"model_id": team.run, "seq_id": 50, **load}),
        "attach": ("POST", "attach_model", {"model_id": team.run}),
        "unload": ("POST", "unload_model", {"model_id": team.run}),
        "sample": ("POST", "asample", sample),
        "sample current": ("POST", "sample", {**sample, "sampling_session_id": f"{team.run}"}),
        "join": ("POST", "join_sampling_session", {"sampling_session_id": team.sampler}),
        "delete": ("DELETE", checkpoint, None),
        "publish": ("POST", f"{checkpoint}/publish", {}),
        "unpublish": ("DELETE", f"{checkpoint}/publish", None),
        "expire": ("PUT", f"{checkpoint}/ttl", {"ttl_seconds": 3600}),
        "model in": ("POST", "create_model", {"session_id": team.session, **model}),
        "load in": ("POST", "load_weights", {"session_id": team.session, **load}),
        "sampler in": (
            "POST",
            "create_sampling_session",
            {"session_id": team.session, "sampling_session_seq_id": 40, "base_model": MODEL},
        ),
        "heartbeat": ("POST", "session_heartbeat", {"session_id": team.session}),
        "finish": ("POST", f"sessions/{team.session}/finish", {"reason": {"type": "success"}}),
        "end": ("DELETE", f"sessions/{team.session}", None),
        "move": ("PUT", f"sessions/{team.session}/project", {"project_id": "vision"}),
        "copy into": ("POST", "copy_weights", {**copy, "destination_project_id": "vision"}),
        "session of": ("POST", "create_session", {"sdk_version": "t", "project_id": "vision"}),
        "upload": ("POST", "checkpoints/uploads", {**named, "project_id": "vision"}),
        "grant": ("PUT", "projects/vision/members/eve", {"role": "admin"}),
        "revoke": ("DELETE", "projects/vision/members/ann", None),
        "rename": ("PATCH", "projects/vision", {"name": "Mine"}),
        "delete project": ("DELETE", "projects/vision", None),
        "program": ("POST", "programs", {"model_id": team.run, "module": "x"}),
    }


def test_nobody_else_finds_anything_of_a_project(team: Team) -> None:
    calls = reads(team) | changes(team)
    calls["sample current"] = ("POST", "asample", {**_sample(), "model_id": team.run})

    statuses = {name: team.send("eve", call).status for name, call in calls.items()}

    assert statuses == dict.fromkeys(calls, 404)
    for call in ("training_runs", "checkpoints", "sessions", "session_usage"):
        shown = team.send("eve", ("GET", f"{call}?access_scope=accessible", None)).body
        assert team.session.encode() not in shown
    assert team.send("eve", ("GET", "projects", None)).json() == {"projects": []}


def _sample() -> dict[str, Any]:
    return {"seq_id": 99, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}}


def test_a_viewer_reads_everything_and_changes_nothing(team: Team) -> None:
    refused = changes(team)
    refused["sample current"] = ("POST", "asample", {**_sample(), "model_id": team.run})

    read = {name: team.send("vic", call).status for name, call in reads(team).items()}
    changed = {name: team.send("vic", call).status for name, call in refused.items()}

    assert read == dict.fromkeys(read, 200)
    assert changed == dict.fromkeys(changed, 403)


def test_a_viewer_loads_samples_and_downloads_a_checkpoint_in_a_session_of_its_own(
    team: Team,
) -> None:
    weights = _a_sampler(team)
    with team.service("vic") as vic:
        training = vic.create_training_client_from_state(team.path).result()
        step(training)
        sampler = vic.create_sampling_client(model_path=weights).result()
        assert sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result().sequences

    assert _downloaded(_urls(team, "vic")["archive"])
    # What a viewer makes of a checkpoint outside the project is its own.
    assert team.send("ann", ("GET", f"training_runs/{training.model_id}", None)).status == 404


def _urls(team: Team, who: str) -> dict[str, str]:
    """Return signed URLs of the team's checkpoint and of the trace of its session."""
    paths = {
        "archive": f"training_runs/{team.run}/checkpoints/weights/kept/archive",
        "trace": f"sessions/{team.session}/trace_export",
    }
    return {
        name: str(team.send(who, ("GET", path, None)).json()["url"]) for name, path in paths.items()
    }


def _downloaded(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
        assert response.status == 200
        return bytes(response.read())


def test_urls_that_were_signed_for_a_member_outlive_its_membership(team: Team) -> None:
    signed = _urls(team, "bob")
    team.command("remove-member", "vision", "bob", "--yes")
    archive = ("GET", f"training_runs/{team.run}/checkpoints/weights/kept/archive", None)
    refused = team.send("bob", archive).status
    kept = {name: _downloaded(url) for name, url in signed.items()}
    team.set_member("bob", "member")

    assert refused == 404
    assert all(kept.values())


def test_a_member_changes_what_others_have_created(team: Team) -> None:
    ids = [5, 6, 7]
    datum = {
        "model_input": {"tokens": ids},
        "loss_fn_inputs": {"target_tokens": {"data": ids, "dtype": "int64"}},
    }
    batch = {"model_id": team.run, "data": [datum], "loss_fn": "cross_entropy"}
    by_bob = f"training_runs/{team.run}/checkpoints/weights/by-bob"

    def done(path: str, /, **body: Any) -> dict[str, Any]:
        answer = team.send("bob", ("POST", path, body))
        assert answer.status == 200, answer.body
        request_id = str(answer.json()["request_id"])
        accept = "application/json"
        result = team.server.result(request_id, key=team.keys["bob"], accept=accept).json()
        assert "error" not in result
        return result

    done("forward_backward", **batch)
    done("optim_step", model_id=team.run, adam_params={"learning_rate": 0.01})
    counts = [_stored(team)]
    saved = done("save_weights", model_id=team.run, path="by-bob")["path"]
    counts.append(_stored(team))
    on_checkpoint: list[Call] = [
        ("POST", f"{by_bob}/publish", {}),
        ("DELETE", f"{by_bob}/publish", None),
        ("DELETE", by_bob, None),
    ]
    statuses = [team.send("bob", call).status for call in on_checkpoint]

    assert saved == f"tinker://{team.run}/weights/by-bob"
    assert statuses == [200] * 3
    # It counts for the owner of the run.
    assert {name: number - counts[0].get(name, 0) for name, number in counts[1].items()} == {
        **dict.fromkeys(counts[0], 0),
        "ann": 1,
    }


def _stored(team: Team) -> dict[str, int]:
    """Return the number of checkpoints in the project by owner."""
    path = "billing/usage/checkpoints/current?project_id=vision"
    rows = team.send("ann", ("GET", path, None)).json()["data"]
    return {row["user_name"]: row["checkpoint_count"] for row in rows}


def test_an_owner_can_be_a_member_before_it_has_a_key(team: Team) -> None:
    team.command("set-member", "vision", "no-key-yet", "viewer")
    key = team.server.new_key("no-key-yet")
    found = team.server.request("GET", f"/api/v1/training_runs/{team.run}", key=key).status
    shown = json.loads(team.command("show", "vision", "--json"))
    assert "no-key-yet is not a member" in team.command(
        "remove-member", "vision", "no-key-yet", "--yes"
    )

    assert found == 200
    assert {"owner": "no-key-yet", "role": "viewer"} in shown
    assert "no-key-yet" not in team.command("show", "vision")


def test_members_use_each_others_runs_with_the_sdk(team: Team) -> None:
    with team.service("bob", project_id="vision") as bob:
        copied = bob.create_training_client_from_state(team.path).result()
        step(copied)
        sampler = bob.create_sampling_client(model_path=_for_sampling(copied)).result()
        assert sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result().sequences
        rest = bob.create_rest_client()
        shown = rest.list_training_runs(access_scope="accessible", project_id="vision").result()
        own = rest.list_training_runs(project_id="vision").result().training_runs

    assert {run.training_run_id for run in own} == {copied.model_id}
    assert {run.model_owner for run in shown.training_runs} == {"ann", "bob"}
    ann = team.server.rest(team.keys["ann"])
    saved = ann.list_checkpoints(copied.model_id).result().checkpoints
    assert [each.checkpoint_id for each in saved] == ["sampler_weights/by-bob"]
    ann.delete_checkpoint_from_tinker_path(saved[0].tinker_path).result()
    assert ann.list_checkpoints(copied.model_id).result().checkpoints == []


def _for_sampling(training: tinker.TrainingClient) -> str:
    return str(training.save_weights_for_sampler("by-bob").result().path)


def test_a_removed_member_finds_nothing_with_its_next_request(team: Team) -> None:
    run = ("GET", f"training_runs/{team.run}", None)
    current = ("POST", "asample", {**_sample(), "model_id": team.run})
    sampler = team.service("bob").create_sampling_client(model_path=_a_sampler(team)).result()
    sampled = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result()
    source = {"sampling_session_id": sampling_session_of(sampler), **_sample()}
    assert sampled.sequences
    assert team.send("bob", run).status == 200

    for _ in range(5):
        assert team.send("ann", ("DELETE", "projects/vision/members/bob", None)).status == 200
        assert team.send("bob", run).status == 404
        # Not from a session of its own either, which samples a checkpoint of the project.
        assert team.send("bob", ("POST", "asample", source)).status == 404
        team.set_member("bob", "viewer")
        assert team.send("bob", run).status == 200
        assert team.send("bob", current).status == 403
        team.set_member("bob", "member")


def _a_sampler(team: Team) -> str:
    with team.service("ann", project_id="vision") as ann:
        training = ann.create_lora_training_client(MODEL, rank=4).result()
        return str(training.save_weights_for_sampler("shared").result().path)


def test_a_removed_member_loses_what_it_created_in_the_project(team: Team) -> None:
    with team.service("bob", project_id="vision") as bob:
        training = bob.create_lora_training_client(MODEL, rank=4).result()
        run = ("GET", f"training_runs/{training.model_id}", None)
        assert team.send("bob", run).status == 200
        team.send("ann", ("DELETE", "projects/vision/members/bob", None))
        missing = team.send("bob", run).status
        listed = team.send("bob", ("GET", "training_runs", None)).body
        team.set_member("bob", "member")

    assert missing == 404
    assert training.model_id.encode() not in listed
    assert team.send("ann", run).status == 200


def test_a_session_is_moved_by_its_owner_into_a_project_of_both(team: Team) -> None:
    rest = team.server.rest(team.keys["bob"])
    with team.service("bob") as bob:
        training = bob.create_lora_training_client(MODEL, rank=4).result()
        session, run = training.holder.get_session_id(), training.model_id
        shown = ("GET", f"training_runs/{run}", None)
        before = team.send("vic", shown).status
        with pytest.raises(tinker.NotFoundError, match="is not a member"):
            rest.assign_session_project(session, "nothing").result()
        rest.assign_session_project(session, "vision").result()
        after = team.send("vic", shown).status
        # The head of a moved session is the same: it still trains.
        step(training)
        created = team.server.request(
            "POST",
            "/api/v1/projects",
            {"name": "Elsewhere", "project_id": "elsewhere"},
            key=team.keys["ann"],
        )
        stolen = team.send(
            "ann", ("PUT", f"sessions/{session}/project", {"project_id": "elsewhere"})
        )

    assert (before, after) == (404, 200)
    assert created.status == 200
    assert stolen.status == 400
    assert "would lose the session" in stolen.detail


def test_an_admin_moves_sessions_of_others_and_a_member_only_its_own(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    team.command("create", "Archive", "--id", "archive")
    for name in ("bob", "vic"):
        team.command("set-member", "archive", name, "member")
    team.set_member("vic", "member")
    monkeypatch.setenv("TINKER_PROJECT_ID", "vision")
    with team.service("bob") as bob:
        session = bob.holder.get_session_id()
    place = ("GET", f"session_usage/{session}", None)
    places = [team.send("ann", place).json()["project_id"]]
    move = ("PUT", f"sessions/{session}/project", {"project_id": "archive"})
    refused = team.send("vic", move)
    team.command("move", session, "archive")
    team.set_member("vic", "viewer")
    places.append(team.send("ann", place).json()["project_id"])
    listed = json.loads(team.command("list", "--json", who="vic"))

    assert refused.status == 403
    assert "only its owner or an admin" in refused.detail
    assert places == ["vision", "archive"]
    assert {(row["project_id"], row["role"]) for row in listed} >= {
        ("archive", "member"),
        ("vision", "viewer"),
    }


def test_the_audit_log_and_the_bill_name_the_project(team: Team) -> None:
    entries = team.send("ann", ("GET", "audit", None)).json()["entries"]
    by_event = {entry["event"]: entry["event_details"] for entry in entries}
    for event in ("project_create", "project_grant_set", "session_create", "model_create"):
        assert by_event[event]["project_ids"] == ["vision"] or event == "project_create"

    storage = (
        tinker.AdminClient(base_url=team.server.url, api_key=team.keys["vic"])
        .get_current_checkpoint_storage_usage(project_id="vision")
        .result()
    )
    assert {row.project_id for row in storage.data} == {"vision"}
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    since, until = (f"{hour + timedelta(hours=n):%Y-%m-%dT%H:00:00Z}" for n in (-1, 2))
    window = f"starting_on={since}&ending_before={until}"

    def billed() -> set[str]:
        events = team.send("ann", ("GET", f"billing/usage/events?{window}", None)).json()["data"]
        return {each["project_id"] for each in events if each["session_id"] == team.session}

    wait_until(lambda: billed() == {"vision"}, "the report of the head")


def test_a_project_is_renamed_and_deleted_by_its_admin_once_it_is_empty(team: Team) -> None:
    team.command("create", "Shrt", "--id", "short")
    team.command("rename", "short", "Short")
    team.command("set-member", "short", "bob", "member")
    shown, delete = ("GET", "projects/short", None), ("DELETE", "projects/short", None)
    named = team.send("bob", shown).json()["name"]
    refused = [
        team.send("bob", call).status
        for call in (delete, ("PATCH", "projects/short", {"name": "Mine"}))
    ]
    with team.service("bob", project_id="short") as bob:
        training = bob.create_lora_training_client(MODEL, rank=4).result()
        path = training.save_state("kept").result().path
        while_training = team.send("ann", delete)
    with_a_checkpoint = team.send("ann", delete)
    team.server.rest(team.keys["ann"]).delete_checkpoint_from_tinker_path(path).result()
    team.command("delete", "short", "--yes")

    assert named == "Short"
    assert refused == [403, 403]
    assert while_training.status == 400
    assert training.holder.get_session_id() in while_training.detail
    assert with_a_checkpoint.status == 400
    assert f"checkpoints (1, such as {path})" in with_a_checkpoint.detail
    assert [team.send(who, shown).status for who in ("ann", "bob")] == [404, 404]
    assert team.send("ann", delete).status == 404
    # The ended run is its owner's again.
    run = ("GET", f"training_runs/{training.model_id}", None)
    assert [team.send(who, run).status for who in ("ann", "bob")] == [404, 200]
    entries = team.send("ann", ("GET", "audit", None)).json()["entries"]
    recorded = [
        (entry["event"], entry["event_details"]["status"])
        for entry in entries
        if entry["event"] in {"project_rename", "project_delete"}
    ]
    assert recorded == [
        ("project_rename", 200),
        *[("project_delete", status) for status in (400, 400, 200, 404)],
    ]


def test_a_project_that_is_created_without_an_id_gets_its_own(own_server: Server) -> None:
    key = own_server.new_key("kim")
    options = ("--api-key", key, "--base-url", own_server.url)
    made = [own_server.post("projects", {"name": "Robots"}, key=key).json() for _ in range(2)]
    printed = own_server.command("projects", "create", "Robots", *options).strip()
    ids = [*(each["project_id"] for each in made), printed]
    with tinker.ServiceClient(base_url=own_server.url, api_key=key, project_id=printed) as service:
        session = service.holder.get_session_id()

    listed = own_server.request("GET", "/api/v1/projects", key=key).json()["projects"]
    used = own_server.request("GET", f"/api/v1/session_usage/{session}", key=key).json()
    assert len(set(ids)) == 3
    assert sorted(row["project_id"] for row in listed) == sorted(ids)
    assert {(row["name"], row["role"]) for row in listed} == {("Robots", "admin")}
    assert used["project_id"] == printed


def test_a_disabled_owner_is_refused_at_once_and_a_limited_one_is_read_only(
    own_server: Server,
) -> None:
    made = json.loads(own_server.command("keys", "create", "leaver", "--json"))["key"]

    def statuses() -> tuple[int, int]:
        body = {"sdk_version": "t"}
        return (
            own_server.request("GET", "/api/v1/sessions", key=made).status,
            own_server.post("create_session", body, key=made).status,
        )

    seen = [statuses()]
    for arguments in (
        ("disable", "leaver", "--yes"),
        ("enable", "leaver"),
        ("set-role", "leaver", "read-only"),
        ("set-role", "leaver", "none"),
    ):
        own_server.command("users", *arguments)
        seen.append(statuses())

    assert seen == [(200, 200), (401, 401), (200, 200), (200, 403), (200, 200)]
    listed = json.loads(own_server.command("users", "list", "--json"))
    row = next(row for row in listed if row["name"] == "leaver")
    assert (row["state"], row["keys"]) == ("enabled", 1)
    own_server.command("users", "create", "newcomer", "--role", "user")
    assert json.loads(own_server.command("users", "show", "newcomer", "--json")) == []
