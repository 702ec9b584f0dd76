"""The commands of the page about weights end in a model of transformers that answers as here."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.small_models.chat import a_chat_model
from tinkercloud_testing.small_models.models import tiny_llama

PAGE = (Path(__file__).parents[3] / "docs" / "use" / "weights.md").read_text()
MODEL = "tiny/tied"
TINKERCLOUD = Path(sys.executable).with_name("tinkercloud")
QUESTION = [{"role": "user", "content": "What is the capital of Tinkercloud?"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with tied embeddings and a chat template."""
    folder = a_chat_model(tmp_path_factory.mktemp("models") / "tied")
    tiny_llama(tied=True).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server of this model."""
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: base}) as running:
        yield running


def commands() -> str:
    """Return the commands of the page up to the answer of transformers."""
    section = PAGE.partition("## Serving it elsewhere")[2].partition("**vLLM**")[0]
    blocks = re.findall(r"^```console\n(.*?)^```", section, re.M | re.S)
    return re.sub(r"^\$ ", "", "".join(blocks), flags=re.M)


@pytest.mark.long
def test_the_merged_model_of_the_page_answers_in_transformers_as_the_server_does(
    server: Server, base: Path, tmp_path: Path
) -> None:
    with server.client() as client:
        training = client.create_lora_training_client(MODEL, rank=4).result()
        for first in range(5, 9):
            step(training, first)
        checkpoint = training.save_state("trained").result().path
        sampled = training.save_weights_for_sampler("trained").result().path
        body = {"model": sampled, "max_tokens": 16, "temperature": 0, "messages": QUESTION}
        answer = server.request("POST", "/oai/api/v1/chat/completions", body).json()

    ran = subprocess.run(
        ["/bin/bash", "-eu"],
        input=commands(),
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": API_KEY,
            "CHECKPOINT": checkpoint,
            "BASE": str(base),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr[-4000:]
    expected = answer["choices"][0]["message"]["content"]
    assert expected
    assert ran.stdout.rstrip("\n").endswith(expected.rstrip("\n")), json.dumps(
        [ran.stdout, expected]
    )


def test_a_merge_that_is_impossible_says_why_and_leaves_no_folder(
    server: Server, base: Path, tmp_path: Path
) -> None:
    with server.client() as client:
        whole = client.create_lora_training_client(MODEL, rank=0).result()
        checkpoint = whole.save_state("whole").result().path
    used = tmp_path / "used"
    used.mkdir()
    (used / "model.safetensors").touch()
    tokenizer_only = a_chat_model(tmp_path / "tokenizer")
    (tokenizer_only / "model.safetensors").unlink()

    for folder, given, why in [
        (used, base, "not an empty folder"),
        (tmp_path / "new", tokenizer_only, f"{tokenizer_only} has no weights; was it downloaded"),
        (tmp_path / "new", base, "those of a whole model"),
    ]:
        ran = subprocess.run(
            [TINKERCLOUD, "checkpoints", "merge", checkpoint, folder, "--base", given],
            env={**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 1
        assert why in ran.stderr
    assert not (tmp_path / "new").exists()
