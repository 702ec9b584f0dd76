"""unload_model releases one model permanently; its checkpoints and other models remain."""

import pytest
import tinker

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.servers import Server

MODEL = "tiny/llama"


def unload(server: Server, model_id: str, key: str | None = None) -> dict[str, object]:
    """Unload a model like SDKs before 0.30; return the result of the future."""
    user = {} if key is None else {"key": key}
    promise = server.post("unload_model", {"model_id": model_id, "type": "unload_model"}, **user)
    assert promise.status == 200, promise.body
    answer = promise.json()
    assert answer["model_id"] == model_id
    return server.result(answer["request_id"], **user).json()


def state_of(server: Server, training: tinker.TrainingClient) -> str:
    session = training.holder.get_session_id()
    usage = server.request("GET", f"/api/v1/session_usage/{session}").json()
    (state,) = [m["state"] for m in usage["models"] if m["model_id"] == training.model_id]
    return str(state)


def test_unloading_a_model_does_not_affect_others_of_its_session(
    server: Server, client: tinker.ServiceClient
) -> None:
    done, other = [client.create_lora_training_client(MODEL, rank=4).result() for _ in range(2)]
    step(done)
    path = done.save_state("kept").result().path
    sampler = done.save_weights_and_get_sampling_client().result()
    assert state_of(server, done) == "in memory"

    assert unload(server, done.model_id) == {"model_id": done.model_id, "type": "unload_model"}
    assert unload(server, done.model_id) == {"model_id": done.model_id, "type": "unload_model"}

    assert state_of(server, done) == "deleted"
    step(other)
    client.create_training_client_from_state(path).result()
    with pytest.raises(tinker.TinkerError, match="was deleted; its checkpoints remain"):
        step(done)
    with pytest.raises(tinker.TinkerError, match="was deleted; its checkpoints remain"):
        sampler.compute_logprobs(tinker.ModelInput.from_ints([5, 6])).result()


def test_only_its_owner_can_unload_a_model(server: Server, client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    stranger = server.new_key("a-stranger")

    refused = server.post("unload_model", {"model_id": training.model_id}, key=stranger)
    request = {"request_id": f"{training.model_id}:unload"}
    asked = server.post("retrieve_future", request, key=stranger)
    early = server.post("retrieve_future", request)

    assert (refused.status, asked.status, early.status) == (404, 404, 404)
    assert "was not unloaded" in early.detail
    step(training)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"model_id": 3}, 400),
        ({"model_id": "nothing"}, 400),
        ({"model_id": "s:train:0"}, 404),
        ({"model_id": "s:train:0", "type": "other"}, 400),
    ],
)
def test_requests_without_a_model_are_rejected(
    server: Server, body: dict[str, object], status: int
) -> None:
    assert server.post("unload_model", body).status == status
