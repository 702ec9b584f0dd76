"""Sampling clients: their numbers, errors and cancelled samples; and compressed batches."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from tinkercloud_testing.clients.sdk_clients import sampling_session_of
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.servers import Server, a_server

MODEL = "tiny/llama"
PROMPT = types.ModelInput.from_ints([5, 6, 7])
SHORT = types.SamplingParams(max_tokens=4, stop=[])
LONG = types.SamplingParams(max_tokens=400, stop=[])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Server]:
    """A server whose clients compress batches."""
    settings = {"TINKERCLOUD_COMPRESS_UPLOADS": "true"}
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: model_folder}, settings) as running:
        yield running


def test_batches_are_sent_compressed(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()

    first, second = step(training), step(training)

    assert training.holder._client_config.proto_compress_fwdbwd
    assert second < first


def test_an_error_of_one_sample_reaches_its_caller(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    too_long = types.SamplingParams(max_tokens=4, stop=["x" * 100_000])

    with pytest.raises(tinker.TinkerError, match="stop"):
        sampler.sample(PROMPT, 1, too_long).result()
    assert sampler.sample(PROMPT, 1, SHORT).result().sequences


@pytest.mark.long
def test_samples_of_a_killed_head_are_sampled_again(
    server: Server, client: tinker.ServiceClient
) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    sampler.sample(PROMPT, 1, SHORT).result()
    futures = [sampler.sample(PROMPT, 1, LONG) for _ in range(8)]
    server.kill_heads()

    assert [len(future.result().sequences[0].tokens) for future in futures] == [400] * 8


def test_unpickled_clients_get_numbers_of_the_server(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    clones = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]  # noqa: S301

    for clone in clones:
        clone.sample(PROMPT, 1, SHORT).result()

    assert sorted(clone._cloned_sampler_id for clone in clones) == [1, 2]


def test_only_the_owner_joins_a_sampling_session(
    server: Server, client: tinker.ServiceClient
) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    session = sampling_session_of(sampler)
    stranger = server.new_key("a-stranger")

    joined = server.post("join_sampling_session", {"sampling_session_id": session}, key=stranger)

    assert joined.status == 404


def test_a_queued_sample_can_be_cancelled(server: Server, client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    session = sampling_session_of(sampler)
    body = {
        "sampling_session_id": session,
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 450, "stop": []},
    }
    request_id = server.post("asample", body).json()["request_id"]

    assert server.post("cancel_future", {"request_id": request_id}).status == 200

    assert server.result(request_id).json()["category"] == "user"
