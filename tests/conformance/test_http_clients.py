"""Clients without an SDK: JSON requests, with as few fields as possible."""

from typing import Any

import pytest

from tinkercloud_testing.servers import Server

MODEL = "tiny/llama"
PROMPT = {"tokens": [1, 2, 3]}
LORA = {"rank": 4, "train_mlp": True, "train_attn": True}


def created(server: Server, **fields: object) -> str:
    """Create a model; return its id once it exists."""
    promise = server.post("create_model", {"model_name": MODEL, "lora_config": LORA, **fields})
    assert promise.status == 200, promise.body
    return str(server.result(promise.json()["request_id"]).json()["model_id"])


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    """Return a model that the tests of this module share."""
    return created(server)


@pytest.fixture(scope="module")
def stranger(server: Server) -> str:
    """Return the key of another owner."""
    return server.new_key("stranger-without-sdk")


def sampled(server: Server, **weights: object) -> dict[str, Any]:
    body = {"prompt": PROMPT, "sampling_params": {"max_tokens": 3, "seed": 1}, **weights}
    answer = server.post("sample", body)
    assert answer.status == 200, answer.body
    return answer.json()


def test_a_model_can_be_created_and_sampled_without_a_session(server: Server, model: str) -> None:
    sequences = sampled(server, model_id=model)["sequences"]

    assert len(sequences[0]["tokens"]) == len(sequences[0]["logprobs"]) <= 3
