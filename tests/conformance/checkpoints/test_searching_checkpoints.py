"""Search for checkpoints by the documented fields of SDK 0.39, with plain requests."""

from collections.abc import Mapping

import pytest
import tinker

from tinkercloud_testing.serving.servers import API_KEY, Answer, Server

MODEL = "tiny/llama"


@pytest.fixture(scope="module")
def key(server: Server) -> str:
    """Return the key of an owner who searches."""
    return server.new_key("searcher")


@pytest.fixture(scope="module", autouse=True)
def project(server: Server, key: str) -> str:
    """Return the project of three training checkpoints and a sampler's."""
    project = server.new_project("blue", key)
    service = tinker.ServiceClient(base_url=server.url, api_key=key, project_id=project)
    server.clients.made.append(service)
    training = service.create_lora_training_client(MODEL, rank=4).result()
    for number in range(3):
        training.save_state(f"s{number}", user_metadata={"step": str(number), "of": "a"}).result()
    training.save_weights_for_sampler("d").result()
    return project


def search(server: Server, key: str, **fields: object) -> Answer:
    return server.post("checkpoints/search", fields, key=key)


def names(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    return [each["checkpoint_id"].split("/")[1] for each in answer.json()["checkpoints"]]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, ["d", "s2", "s1", "s0"]),
        ({"checkpoint_type": "training"}, ["s2", "s1", "s0"]),
        ({"checkpoint_type": "external"}, []),
        ({"user_metadata": {"step": "1"}}, ["s1"]),
        ({"user_metadata": {"step": "1", "of": "b"}}, []),
        ({"user_metadata": {"a'; \"b": "1"}}, []),
        ({"base_models": [MODEL, "x"]}, ["d", "s2", "s1", "s0"]),
        ({"base_models": []}, []),
        ({"owner": {"type": "user", "owner_urns": ["searcher"]}, "limit": 1}, ["d"]),
    ],
)
def test_checkpoints_are_found_by_their_fields(
    server: Server, key: str, fields: Mapping[str, object], found: list[str]
) -> None:
    assert names(search(server, key, **fields)) == found


def test_checkpoints_are_found_by_project(server: Server, key: str, project: str) -> None:
    empty = server.new_project("red", key)

    assert names(search(server, key, project_ids=[project])) == ["d", "s2", "s1", "s0"]
    assert names(search(server, key, project_ids=[empty])) == []


def test_pages_follow_each_other_without_gaps(server: Server, key: str) -> None:
    found, cursor = [], None
    while True:
        fields = {"limit": 1} if cursor is None else {"limit": 1, "cursor": cursor}
        answer = search(server, key, **fields)
        found += names(answer)
        cursor = answer.json().get("next_cursor")
        if cursor is None:
            break

    assert found == ["d", "s2", "s1", "s0"]
    (newest,) = search(server, key, limit=1).json()["checkpoints"]
    assert newest["base_model"] == MODEL


def test_an_owner_finds_only_its_own_checkpoints_and_an_admin_all(
    server: Server, key: str, project: str
) -> None:
    everybody = {"owner": {"type": "accessible"}, "project_ids": [project]}
    other = server.new_key("another")

    assert search(server, other, **everybody).status == 404
    assert names(search(server, other, owner={"type": "accessible"})) == []
    assert names(search(server, API_KEY, **everybody)) == names(search(server, key))
    assert search(server, other, owner={"type": "user", "owner_urns": ["searcher"]}).status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"limit": 0},
        {"limit": 201},
        {"checkpoint_type": "x"},
        {"owner": {"type": "user"}},
        {"cursor": {"last_created_at": "yesterday", "last_checkpoint_uuid": "x"}},
        {"cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_checkpoint_uuid": "x"}},
        {"base_models": "m"},
    ],
)
def test_wrong_searches_are_rejected(
    server: Server, key: str, fields: Mapping[str, object]
) -> None:
    assert search(server, key, **fields).status == 400
