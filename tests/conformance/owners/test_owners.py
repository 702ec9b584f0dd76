"""Owners cannot see each other's objects; an admin sees all."""

import json
import re

import pytest
import tinker
from tinker import types

from tinkercloud_testing.serving.servers import API_KEY, Server

MODEL = "tiny/llama"


@pytest.fixture(scope="module")
def stranger(server: Server) -> str:
    """Return the key of another owner."""
    return server.new_key("stranger")


def test_each_owner_lists_only_its_own_objects(server: Server, stranger: str) -> None:
    training = server.client().create_lora_training_client(MODEL, rank=4).result()
    training.save_state("theirs").result()

    mine = server.rest(stranger).list_training_runs().result().training_runs
    checkpoints = server.rest(stranger).list_user_checkpoints().result().checkpoints

    assert mine == []
    assert checkpoints == []
    everything = server.rest(API_KEY).list_training_runs(limit=100).result().training_runs
    assert training.model_id in {run.training_run_id for run in everything}


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

    server.command("keys", "revoke", "--yes", str(made["id"]))

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
            assert re.search("X-API-Key|the API key is unknown", answer.detail)
