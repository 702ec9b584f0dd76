"""Owners cannot see each other's objects; an admin sees all."""

import json

import pytest
import tinker
from tinker import types

from tinkercloud_testing.servers import API_KEY, Server

MODEL = "tiny/llama"


@pytest.fixture(scope="module")
def stranger(server: Server) -> str:
    """Return the key of another owner."""
    return server.new_key("stranger")


@pytest.fixture(scope="module")
def theirs(server: Server) -> dict[str, str]:
    """Return the first owner's objects: a run, checkpoints, a sampler, a session, a request."""
    client = server.client()
    training = client.create_lora_training_client(MODEL, rank=4).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    return {
        "run": training.model_id,
        "session": training.holder.get_session_id(),
        "path": training.save_state("mine").result().path,
        "sampler": sampler._sampling_session_id,
        "request": f"{training.model_id}:0",
    }


def test_objects_of_another_owner_are_not_found(
    server: Server, stranger: str, theirs: dict[str, str]
) -> None:
    run, session, path = theirs["run"], theirs["session"], theirs["path"]
    own = server.post("create_session", {"sdk_version": "t"}, key=stranger).json()["session_id"]
    attempts = {
        "get_info": ("POST", "get_info", {"model_id": run}),
        "optim_step": ("POST", "optim_step", {"model_id": run, "seq_id": 9, "adam_params": {}}),
        "save": ("POST", "save_weights", {"model_id": run, "seq_id": 9, "path": "x"}),
        "result": ("POST", "retrieve_future", {"request_id": theirs["request"]}),
        "sample": ("POST", "asample", a_sample(theirs["sampler"])),
        "sampler": ("GET", f"samplers/{theirs['sampler']}", None),
        "show": ("GET", f"training_runs/{run}", None),
        "list": ("GET", f"training_runs/{run}/checkpoints", None),
        "delete": ("DELETE", f"training_runs/{run}/checkpoints/weights/mine", None),
        "publish": ("POST", f"training_runs/{run}/checkpoints/weights/mine/publish", {}),
        "ttl": ("PUT", f"training_runs/{run}/checkpoints/weights/mine/ttl", {"ttl_seconds": 3600}),
        "info": ("POST", "weights_info", {"tinker_path": path}),
        "session": ("GET", f"sessions/{session}", None),
        "finish": ("POST", f"sessions/{session}/finish", {"reason": {"type": "success"}}),
        "end": ("DELETE", f"sessions/{session}", None),
        "heartbeat": ("POST", "session_heartbeat", {"session_id": session}),
        "create in": ("POST", "create_model", create_model(session)),
        "load": ("POST", "load_weights", load(own, path)),
        "sampler of": ("POST", "create_sampling_session", sampler_of(own, path)),
    }

    statuses = {
        name: server.request(method, f"/api/v1/{url}", body, key=stranger).status
        for name, (method, url, body) in attempts.items()
    }

    assert statuses == dict.fromkeys(attempts, 404)


def a_sample(sampler: str) -> dict[str, object]:
    chunk = {"type": "encoded_text", "tokens": [1, 2]}
    return {"sampling_session_id": sampler, "seq_id": 99, "prompt": {"chunks": [chunk]}}


def create_model(session: str) -> dict[str, object]:
    lora = {"rank": 4}
    return {"session_id": session, "model_seq_id": 7, "base_model": MODEL, "lora_config": lora}


def load(session: str, path: str) -> dict[str, object]:
    return {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}


def sampler_of(session: str, path: str) -> dict[str, object]:
    return {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}


def test_each_owner_lists_only_its_own_objects(
    server: Server, stranger: str, theirs: dict[str, str]
) -> None:
    mine = server.rest(stranger).list_training_runs().result().training_runs
    checkpoints = server.rest(stranger).list_user_checkpoints().result().checkpoints

    assert mine == []
    assert checkpoints == []
    everything = server.rest(API_KEY).list_training_runs(limit=100).result().training_runs
    assert theirs["run"] in {run.training_run_id for run in everything}


def test_a_published_checkpoint_can_be_read_by_others_until_it_is_unpublished(
    server: Server, stranger: str
) -> None:
    owner = server.client()
    training = owner.create_lora_training_client(MODEL, rank=4).result()
    path = training.save_state("shared").result().path
    text = types.ModelInput.from_ints([1, 2, 3])

    server.rest().publish_checkpoint_from_tinker_path(path).result()
    sampler = server.client(stranger).create_sampling_client(model_path=path).result()
    logprobs = sampler.compute_logprobs(text).result()
    server.rest().unpublish_checkpoint_from_tinker_path(path).result()

    assert len(logprobs) == 3
    with pytest.raises(tinker.NotFoundError):
        server.client(stranger).create_sampling_client(model_path=path).result()


def test_a_revoked_key_is_rejected_at_the_next_request(server: Server) -> None:
    made = json.loads(server.command("keys", "create", "leaver", "--json"))

    def status() -> int:
        return server.request("GET", "/api/v1/sessions", key=made["key"]).status

    assert status() == 200

    server.command("keys", "revoke", str(made["id"]))

    assert status() == 401


def test_a_key_that_revokes_itself_is_rejected_immediately(server: Server) -> None:
    key = server.new_key("leaver")
    assert server.request("GET", "/api/v1/sessions", key=key).status == 200

    assert server.request("DELETE", "/api/v1/auth/apikey/me", key=key).status == 200

    assert server.request("GET", "/api/v1/sessions", key=key).status == 401


def test_missing_and_unknown_keys_are_rejected(server: Server) -> None:
    for key in (None, "tml-unknown", ""):
        for path in ("get_info", "forward_backward", "retrieve_future", "client/config"):
            answer = server.post(path, {}, key=key)

            assert answer.status == 401
            assert "X-API-Key" in answer.detail
