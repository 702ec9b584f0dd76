"""The models of a vanished client leave memory, and are restored when the client returns."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tinkercloud_testing.clients.sdk_steps import ADAM, a_datum, step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import TRAINERS, Server, a_server

MODEL = "tiny/llama"
PROMPT = types.ModelInput.from_ints([5, 6, 7])
SETTINGS = {"TINKERCLOUD_SESSION_SILENCE_SECONDS": "1"}
"""Shorter than the interval of heartbeats: every client without requests counts as silent, while
its requests are served as usual."""


@pytest.fixture(scope="module")
def own_server(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, trainer: str
) -> Iterator[Server]:
    """Run a server that treats clients as silent after a second."""
    settings = {**TRAINERS[trainer], **SETTINGS}
    state_dir = tmp_path_factory.mktemp("state")
    with a_server(state_dir, {MODEL: model_folder}, settings) as running:
        yield running


def a_training_client(server: Server) -> tinker.TrainingClient:
    client = server.client()
    return client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()


def models(server: Server) -> dict[str, dict[str, Any]]:
    """Return the description of each model by id."""
    path = "/api/v1/session_usage?access_scope=accessible&limit=1000"
    sessions = server.request("GET", path).json()["sessions"]
    return {model["model_id"]: model for session in sessions for model in session["models"]}


def the_session(server: Server, key: str) -> dict[str, Any]:
    """Return the description of an owner's only session."""
    (session,) = server.request("GET", "/api/v1/session_usage", key=key).json()["sessions"]
    assert isinstance(session, dict)
    return session


def be_silent(server: Server, *clients: tinker.TrainingClient) -> None:
    """Wait until all models of these clients have left the memory of the head."""

    def is_over() -> bool:
        held = [models(server)[training.model_id] for training in clients]
        return all(each["state"] == "suspended" for each in held)

    wait_until(is_over, "the suspension of silent clients' models")
    assert {models(server)[training.model_id]["memory_bytes"] for training in clients} == {0}


def losses_without_a_pause(server: Server, steps: int) -> list[float]:
    training = a_training_client(server)
    return [step(training) for _ in range(steps)]


@pytest.mark.long
def test_a_returning_client_trains_as_if_it_had_never_been_idle(
    own_server: Server,
) -> None:
    expected = losses_without_a_pause(own_server, 5)
    training = a_training_client(own_server)
    losses = [step(training) for _ in range(2)]

    be_silent(own_server, training)
    losses += [step(training)]
    be_silent(own_server, training)
    losses += [step(training) for _ in range(2)]

    assert losses == expected
    assert own_server.rest().list_checkpoints(training.model_id).result().checkpoints == []


def test_concurrent_requests_after_an_idle_period_run_in_order(
    own_server: Server,
) -> None:
    expected = losses_without_a_pause(own_server, 10)
    training = a_training_client(own_server)
    losses = [step(training)]
    be_silent(own_server, training)

    sent, applied = [], []
    for _ in range(9):
        sent.append(training.forward_backward([a_datum(5)], "cross_entropy"))
        applied.append(training.optim_step(ADAM))

    assert losses + [future.result().metrics["loss:sum"] for future in sent] == expected
    metrics = [future.result().metrics or {} for future in applied]
    assert [each["step"] for each in metrics] == list(range(2, 11))


def test_gradients_results_and_samplers_are_restored(own_server: Server) -> None:
    training = a_training_client(own_server)
    step(training)
    sampler = training.save_weights_and_get_sampling_client().result()
    logprobs = sampler.compute_logprobs(PROMPT).result()
    added = training.forward_backward([a_datum(5)], "cross_entropy")

    be_silent(own_server, training)

    assert sampler.compute_logprobs(PROMPT).result() == logprobs
    assert added.result().metrics["loss:sum"] > 0
    be_silent(own_server, training)
    metrics = training.optim_step(ADAM).result().metrics or {}
    assert metrics["step"] == 2
    assert metrics["grad_norm"] > 0


def test_a_client_waiting_for_a_slow_request_is_not_idle(own_server: Server) -> None:
    training = a_training_client(own_server)
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=400, stop=[], seed=1)

    sampled = [sampler.sample(PROMPT, 8, params) for _ in range(4)]

    assert [len(each.result().sequences) for each in sampled] == [8] * 4


@pytest.mark.long
def test_an_idle_model_survives_a_restart_a_killed_server_and_a_killed_head(
    own_server: Server,
) -> None:
    expected = losses_without_a_pause(own_server, 5)
    training = a_training_client(own_server)
    losses = [step(training)]

    for end in (
        own_server.stop,
        own_server.kill,
        own_server.kill_heads,
    ):
        losses += [step(training)]
        be_silent(own_server, training)
        end()
        if end != own_server.kill_heads:
            own_server.start()

    losses += [step(training)]
    assert losses == expected


def test_idle_models_of_one_owner_do_not_disturb_another(own_server: Server) -> None:
    expected = losses_without_a_pause(own_server, 25)
    vanished = [a_training_client(own_server) for _ in range(5)]
    for each in vanished:
        step(each)
    key = own_server.new_key("another")
    client = own_server.client(key)
    training = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()

    losses = [step(training) for _ in range(25)]

    be_silent(own_server, *vanished)
    assert losses == expected


def test_an_idle_model_that_is_deleted_is_removed_from_store_and_memory(own_server: Server) -> None:
    training = a_training_client(own_server)
    step(training)
    be_silent(own_server, training)
    folder = own_server.state_dir / "checkpoints" / "runs" / training.model_id / "suspended"
    assert list(folder.rglob("manifest.json"))

    session = training.holder.get_session_id()
    own_server.request("DELETE", f"/api/v1/sessions/{session}")

    assert list(folder.rglob("*.*")) == []
    assert models(own_server)[training.model_id]["state"] == "deleted"


def test_a_restored_model_leaves_nothing_in_the_store(own_server: Server) -> None:
    training = a_training_client(own_server)
    step(training)
    be_silent(own_server, training)
    folder = own_server.state_dir / "checkpoints" / "runs" / training.model_id / "suspended"

    sent = training.forward_backward([a_datum(5)] * 64, "cross_entropy")

    wait_until(lambda: not list(folder.rglob("*.*")), "the end of the suspended state")
    sent.result()


def test_the_list_of_sessions_shows_clients_that_vanished_and_what_they_have_in_memory(
    own_server: Server,
) -> None:
    key = own_server.new_key("gone")
    session = own_server.post("create_session", {"sdk_version": "none"}, key=key).json()
    body = {"base_model": MODEL, "lora_config": {"rank": 4}, **session}
    created = own_server.post("create_model", body, key=key).json()
    own_server.result(created["request_id"], key=key)
    wait_until(lambda: the_session(own_server, key)["memory_bytes"] == 0, "the suspension")
    with closing(sqlite3.connect(own_server.state_dir / "catalog.db")) as catalog, catalog:
        past = (datetime.now(UTC) - timedelta(minutes=3)).strftime("%Y-%m-%d %H:%M:%S.000000")
        change = "UPDATE sessions SET last_heartbeat_at = ? WHERE owner = 'gone'"
        catalog.execute(change, (past,))

    listed = own_server.command("sessions", "list", "--api-key", key)
    own_server.post("session_heartbeat", session, key=key)
    save = {"model_id": created["model_id"], "path": "back"}
    saved = own_server.post("save_weights", save, key=key).json()

    assert own_server.result(saved["request_id"], key=key).status == 200
    heartbeat = past.partition(".")[0].replace(" ", "T") + "Z"
    for text in (session["session_id"], "gone", "silent", heartbeat, "1 suspended", "0 bytes"):
        assert text in listed
    wait_until(lambda: the_session(own_server, key)["state"] == "live", "the heartbeat")
