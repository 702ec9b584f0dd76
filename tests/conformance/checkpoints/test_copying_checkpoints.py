"""Copies of checkpoints, and what a published checkpoint permits to other owners."""

import uuid

import numpy as np
import pytest
import tinker
from tinker import types

from tinkercloud_testing.clients.sdk_steps import score, step
from tinkercloud_testing.serving.servers import API_KEY, Answer, Server

MODEL = "tiny/llama"
TOKENS = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def reader(server: Server) -> str:
    """Return the key of another owner."""
    return server.new_key("reader")


@pytest.fixture(scope="module")
def author(server: Server) -> str:
    """Return the key of the owner of the checkpoints, who is no admin."""
    return server.new_key("author")


@pytest.fixture
def mine(server: Server, author: str) -> tuple[tinker.TrainingClient, str]:
    """Return a model of the author that was trained a step, and its training checkpoint."""
    training = server.client(author).create_lora_training_client(MODEL, rank=4).result()
    step(training)
    return training, training.save_state(f"at-{uuid.uuid4().hex[:8]}").result().path


def rest(server: Server, key: str) -> tinker.RestClient:
    return server.rest(key)


def test_the_sdk_copies_both_kinds_of_checkpoints_into_a_run_of_the_caller(
    server: Server, author: str, mine: tuple[tinker.TrainingClient, str]
) -> None:
    training, saved = mine
    drawn = training.save_weights_for_sampler("drawn").result().path
    project = server.new_project("archive", author)
    service = tinker.ServiceClient(base_url=server.url, api_key=author, project_id=project)

    copies = [service.copy_weights(path, ttl_seconds=3600).result() for path in (saved, drawn)]

    listed = {
        each.tinker_path: each
        for each in rest(server, author).list_user_checkpoints().result().checkpoints
    }
    assert [listed[copy].checkpoint_type for copy in copies] == ["training", "sampler"]
    assert all(listed[copy].expires_at is not None for copy in copies)
    assert listed[copies[0]].size_bytes == listed[saved].size_bytes
    runs = rest(server, author).list_training_runs(project_id=project).result().training_runs
    assert {run.training_run_id for run in runs} == {copy.split("/")[2] for copy in copies}
    # The copies do not depend on their sources.
    expected = score(training, TOKENS)
    for path in (saved, drawn):
        rest(server, author).delete_checkpoint_from_tinker_path(path).result()
    with server.client(author) as client:
        resumed = client.create_training_client_from_state_with_optimizer(copies[0]).result()
        np.testing.assert_allclose(score(resumed, TOKENS), expected, atol=1e-6)
        sampler = client.create_sampling_client(model_path=copies[1]).result()
        drawn_again = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    np.testing.assert_allclose(np.asarray(drawn_again[1:], float), expected, atol=1e-5)


def copy(
    server: Server, source: str, *, key: str, token: object = None, **fields: object
) -> Answer:
    """Send a copy_weights request with an idempotency key, by default a new one."""
    headers = {"X-Idempotency-Key": str(fields.pop("idempotency_key", uuid.uuid4()))}
    if token is not None:
        headers["X-Tinker-Weights-Access-Token"] = str(token)
    body = {"source_path": source, **fields}
    return server.request("POST", "/api/v1/copy_weights", body, key=key, headers=headers)


def test_a_repeated_copy_is_the_same_copy(
    server: Server, author: str, mine: tuple[tinker.TrainingClient, str]
) -> None:
    training, saved = mine
    other = training.save_state(f"other-{uuid.uuid4().hex[:8]}").result().path
    key = str(uuid.uuid4())

    first, second = (copy(server, saved, key=author, idempotency_key=key) for _ in range(2))
    another = copy(server, saved, key=author)
    misused = copy(server, other, key=author, idempotency_key=key)

    assert first.json() == second.json()
    assert another.json() != first.json()
    assert (misused.status, "already used for another request" in misused.detail) == (400, True)


def test_a_copy_can_belong_to_a_session_of_the_caller(
    server: Server, author: str, reader: str, mine: tuple[tinker.TrainingClient, str]
) -> None:
    training, saved = mine
    session = training.holder.get_session_id()

    made = copy(server, saved, key=author, session_id=session, model_seq_id=7).json()
    again = copy(server, saved, key=author, session_id=session, model_seq_id=7).json()
    taken = copy(server, saved, key=author, session_id=session, model_seq_id=0)
    theirs = copy(server, saved, key=API_KEY, session_id=session, model_seq_id=8)

    assert made == again
    assert made["tinker_path"].startswith(f"tinker://{session}:train:7/weights/")
    assert (taken.status, "holds something else" in taken.detail) == (400, True)
    assert theirs.status == 200, "an admin may use a session of another owner"
    assert copy(server, saved, key=reader, session_id=session, model_seq_id=9).status == 404


def test_wrong_copies_are_rejected(
    server: Server, author: str, mine: tuple[tinker.TrainingClient, str]
) -> None:
    _, saved = mine
    wrong: list[tuple[str, dict[str, object], int, str]] = [
        ("tinker://x", {}, 400, "not a checkpoint"),
        (saved + "x", {}, 404, "does not exist"),
        (saved, {"ttl_seconds": 5}, 400, "ttl_seconds"),
        (saved, {"session_id": "s"}, 400, "both session_id and model_seq_id"),
        (saved, {"session_id": "s", "model_seq_id": 1}, 404, "session 's'"),
        (saved.replace("/weights/", "/external_weights/"), {}, 400, "can't be copied"),
        (saved, {"token": "tml-nobody"}, 400, "weights_access_token"),
    ]

    for source, fields, status, message in wrong:
        answer = copy(server, source, key=author, **fields)

        assert (answer.status, message in answer.detail) == (status, True), answer.body


def test_a_token_of_another_owner_reads_for_the_caller(
    server: Server, author: str, reader: str, mine: tuple[tinker.TrainingClient, str]
) -> None:
    training, saved = mine
    expected = score(training, TOKENS)

    denied = copy(server, saved, key=reader)
    copied = copy(server, saved, key=reader, token=author)
    with server.client(reader) as client:
        created = client.create_training_client_from_state(
            saved, weights_access_token=author
        ).result()
        own = client.create_lora_training_client(MODEL, rank=4).result()
        own.load_state(saved, weights_access_token=author).result()
        for each in (created, own):
            np.testing.assert_allclose(score(each, TOKENS), expected, atol=1e-6)

    assert denied.status == 404
    assert copied.status == 200
    listed = rest(server, reader).list_user_checkpoints().result().checkpoints
    assert copied.json()["tinker_path"] in {each.tinker_path for each in listed}
    # No key is kept in the store.
    files = [path for path in (server.state_dir / "checkpoints").rglob("*") if path.is_file()]
    assert not [path for path in files if author.encode() in path.read_bytes()]


def attempts(path: str, session: str) -> dict[str, tuple[str, str, object]]:
    """Return the requests that read a checkpoint, by name: method, path and body."""
    run, checkpoint = path.split("/")[2], "/".join(path.split("/")[3:])
    sampler = {"session_id": session, "sampling_session_seq_id": 5, "model_path": path}
    load = {"session_id": session, "model_seq_id": 5, "path": path, "optimizer": True}
    return {
        "info": ("POST", "weights_info", {"tinker_path": path}),
        "run": ("GET", f"training_runs/{run}", None),
        "archive": ("GET", f"training_runs/{run}/checkpoints/{checkpoint}/archive", None),
        "sampler": ("POST", "create_sampling_session", sampler),
        "load": ("POST", "load_weights", load),
        "copy": ("POST", "copy_weights", {"source_path": path}),
    }


def changes(path: str) -> dict[str, tuple[str, str, object]]:
    """Return the requests that only the owner of a checkpoint may send."""
    run, checkpoint = path.split("/")[2], "/".join(path.split("/")[3:])
    of = f"training_runs/{run}/checkpoints"
    save = {"model_id": run, "seq_id": 9, "path": "x"}
    return {
        "list": ("GET", of, None),
        "ttl": ("PUT", f"{of}/{checkpoint}/ttl", {"ttl_seconds": 3600}),
        "publish": ("POST", f"{of}/{checkpoint}/publish", {}),
        "unpublish": ("DELETE", f"{of}/{checkpoint}/publish", None),
        "delete": ("DELETE", f"{of}/{checkpoint}", None),
        "train": ("POST", "optim_step", {"model_id": run, "seq_id": 9, "adam_params": {}}),
        "save": ("POST", "save_weights", save),
        "describe": ("POST", "get_info", {"model_id": run}),
    }


def statuses(server: Server, key: str, requests: dict[str, tuple[str, str, object]]) -> set[int]:
    return {
        server.request(method, f"/api/v1/{path}", body, key=key).status
        for method, path, body in requests.values()
    }


def test_a_published_checkpoint_can_be_read_by_others_and_not_changed(
    server: Server, author: str, reader: str, mine: tuple[tinker.TrainingClient, str]
) -> None:
    training, saved = mine
    private = training.save_state("private").result().path
    owner, other = rest(server, author), rest(server, reader)
    session = server.post("create_session", {"sdk_version": "t"}, key=reader).json()["session_id"]
    assert statuses(server, reader, attempts(saved, session)) == {404}

    owner.publish_checkpoint_from_tinker_path(saved).result()

    run = other.get_training_run_by_tinker_path(saved).result()
    assert (run.base_model, run.lora_rank) == (MODEL, 4)
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == saved
    with server.client(reader) as client:
        loaded = client.create_training_client_from_state_with_optimizer(saved).result()
        own = client.create_lora_training_client(MODEL, rank=4).result()
        own.load_state(saved).result()
        for each in (loaded, own):
            np.testing.assert_allclose(score(each, TOKENS), score(training, TOKENS), atol=1e-6)
        sampler = client.create_sampling_client(model_path=saved).result()
        assert len(sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()) == 5
    copied = other.copy_weights(saved, server.new_project("copies", reader)).result()
    assert statuses(server, reader, attempts(saved, session)) == {200}
    assert statuses(server, reader, changes(saved)) == {404}
    only_private = {k: v for k, v in attempts(private, session).items() if k != "run"}
    assert statuses(server, reader, only_private) == {404}
    mine_too = other.list_user_checkpoints().result().checkpoints
    assert saved not in {each.tinker_path for each in mine_too}

    owner.unpublish_checkpoint_from_tinker_path(saved).result()

    other_session = server.post("create_session", {"sdk_version": "t"}, key=reader).json()
    again = attempts(saved, other_session["session_id"])
    assert statuses(server, reader, again) == {404}
    assert not next(each for each in mine_too if each.tinker_path == copied).public
    with server.client(reader) as client:
        client.create_sampling_client(model_path=copied).result()
