"""`get_tokenizer()` finds the served model's tokenizer without the public hub."""

import os
import subprocess
import sys
from pathlib import Path

from tinkercloud_testing.models import byte_tokenizer
from tinkercloud_testing.servers import API_KEY, Server

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
    """Run a program as a user whose hub is at an address."""
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


def test_the_sdk_gets_a_tokenizer_on_this_machine_without_any_hub(
    server: Server, tmp_path: Path
) -> None:
    result = run(ENCODE_WITH_THE_SDK, server, tmp_path, endpoint="http://127.0.0.1:9")

    assert result.stdout.strip() == str(byte_tokenizer().encode(TEXT)), result.stderr


def test_transformers_loads_a_tokenizer_from_the_mirror(server: Server, tmp_path: Path) -> None:
    result = run(LOAD_FROM_THE_HUB, server, tmp_path, endpoint=f"{server.url}/hf")

    assert result.stdout.strip() == str(byte_tokenizer().encode(TEXT)), result.stderr


def test_the_mirror_gives_no_weights_away(server: Server, tmp_path: Path) -> None:
    result = run(DOWNLOAD_WEIGHTS, server, tmp_path, endpoint=f"{server.url}/hf")

    assert result.returncode != 0
    assert "EntryNotFound" in result.stderr


def test_a_client_elsewhere_is_given_the_name_that_the_mirror_knows(server: Server) -> None:
    training = server.client().create_lora_training_client(MODEL, rank=4).result()
    body = {"model_id": training.model_id}

    here = server.post("get_info", body).json()
    elsewhere = server.request(
        "POST", "/api/v1/get_info", body, headers={"X-Forwarded-For": "192.0.2.7"}
    ).json()

    assert here["model_data"]["tokenizer_id"] != MODEL
    assert elsewhere["model_data"]["tokenizer_id"] == MODEL
