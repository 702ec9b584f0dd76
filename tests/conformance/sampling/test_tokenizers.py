"""`get_tokenizer()` loads the tokenizer of a served model without the public hub."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.small_models.models import byte_tokenizer

MODEL = "tiny/llama"
TEXT = "a text\n"

ENCODE_WITH_THE_SDK = f"""
import tinker
training = tinker.ServiceClient().create_lora_training_client({MODEL!r}, rank=4).result()
print(training.get_tokenizer().encode({TEXT!r}))
"""
LOAD_FROM_THE_HUB = f"""
from transformers import AutoTokenizer
print(AutoTokenizer.from_pretrained({MODEL!r}).encode({TEXT!r}))
"""
DOWNLOAD_WEIGHTS = f"""
from huggingface_hub import hf_hub_download
hf_hub_download({MODEL!r}, "model.safetensors")
"""


def run(
    program: str, server: Server, cache: Path, endpoint: str
) -> subprocess.CompletedProcess[str]:
    """Run a program as a user with this address as the hub."""
    variables = {
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": API_KEY,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
    }
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
def test_the_sdk_loads_a_tokenizer_locally_without_a_hub(server: Server, tmp_path: Path) -> None:
    result = run(ENCODE_WITH_THE_SDK, server, tmp_path, endpoint="http://127.0.0.1:9")

    assert result.stdout.strip() == str(byte_tokenizer().encode(TEXT)), result.stderr


@pytest.mark.long
def test_transformers_loads_a_tokenizer_from_the_mirror(server: Server, tmp_path: Path) -> None:
    result = run(LOAD_FROM_THE_HUB, server, tmp_path, endpoint=f"{server.url}/hf")

    assert result.stdout.strip() == str(byte_tokenizer().encode(TEXT)), result.stderr


def test_the_mirror_does_not_serve_weights(server: Server, tmp_path: Path) -> None:
    result = run(DOWNLOAD_WEIGHTS, server, tmp_path, endpoint=f"{server.url}/hf")

    assert result.returncode != 0
    assert "EntryNotFound" in result.stderr


def test_a_remote_client_receives_the_name_used_by_the_mirror(server: Server) -> None:
    training = server.client().create_lora_training_client(MODEL, rank=4).result()
    body = {"model_id": training.model_id}

    here = server.post("get_info", body).json()
    elsewhere = server.request(
        "POST", "/api/v1/get_info", body, headers={"X-Forwarded-For": "192.0.2.7"}
    ).json()

    assert here["model_data"]["tokenizer_id"] != MODEL
    assert elsewhere["model_data"]["tokenizer_id"] == MODEL


LLAMA, VARIANT = "meta-llama/Llama-3.2-1B-Instruct", "org/model/variant"
LONG = f"{MODEL}:peft:262144"
GET_TOKENIZERS = f"""
import sys, tinker
from tinker_cookbook.tokenizer_utils import get_tokenizer
name = sys.argv[1]
client = tinker.ServiceClient()
training = client.create_lora_training_client(name, rank=4).result()
sampling = client.create_sampling_client(base_model=name)
tokenizers = [training.get_tokenizer(), sampling.get_tokenizer()]
if name.count("/") < 2:
    tokenizers.append(get_tokenizer(name))
for tokenizer in tokenizers:
    assert tokenizer.encode({TEXT!r}) == {byte_tokenizer().encode(TEXT)!r}
print(len(tokenizers), "tokenizers")
"""


@pytest.fixture(scope="module")
def named(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server that serves a model under names that clients map to other tokenizer names."""
    models = dict.fromkeys(["meta-llama/Llama-3.1-8B", LLAMA, VARIANT, MODEL], model_folder)
    state_dir = tmp_path_factory.mktemp("named")
    with a_server(state_dir, models, {"TINKERCLOUD_PRELOAD": "false"}) as running:
        yield running


@pytest.mark.parametrize(
    "name", [LLAMA, *(pytest.param(each, marks=pytest.mark.long) for each in (VARIANT, LONG))]
)
def test_the_sdk_and_the_cookbook_load_tokenizers_of_renamed_models_offline(
    named: Server, tmp_path: Path, name: str
) -> None:
    program = GET_TOKENIZERS.replace("sys.argv[1]", repr(name))

    result = run(program, named, tmp_path, endpoint=f"{named.url}/hf")

    assert result.stdout.strip().endswith("tokenizers"), result.stderr


def test_a_model_name_with_a_context_length_selects_the_same_model(named: Server) -> None:
    client = named.client()

    training = client.create_lora_training_client(LONG, rank=4).result()
    path = training.save_state("a").result().path
    resumed = client.create_training_client_from_state(path).result()
    session = named.post("create_session", {"sdk_version": "1"}).json()["session_id"]
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    by_long_name = named.post("create_sampling_session", {**sampler, "base_model": LONG})

    assert training.get_info().model_name == MODEL
    assert resumed.get_info().model_name == MODEL
    assert named.rest().get_weights_info_by_tinker_path(path).result().base_model == MODEL
    assert by_long_name.status == 200, by_long_name.body
    for unknown in (f"{MODEL}:peft:", f"{MODEL}:peft:0", f"{MODEL}:other:1", "no/such:peft:1"):
        body = {"session_id": session, "model_seq_id": 0, "base_model": unknown}
        answer = named.post("create_model", body)
        assert (answer.status, "is not served here" in answer.detail) == (400, True)
