"""An agent that only knows the openai package produces training data."""

import os
import subprocess
import sys
from typing import Any

import httpx
import openai
import pytest
import tinker
from tinker import types

from tinkercloud_testing.serving.servers import API_KEY, Server
from tinkercloud_testing.small_models.chat import CHAT_MODEL


def call(server: Server, method: str, path: str, key: str = API_KEY, **options: Any) -> Any:
    url = f"{server.url}/oai/sessions{path}"
    return httpx.request(method, url, headers={"Authorization": f"Bearer {key}"}, **options)


def an_agent(base_url: str, model: str) -> None:
    """Hold a conversation of two turns, the second one streamed."""
    with openai.OpenAI(base_url=base_url, api_key=API_KEY, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Hello"}]
        options: Any = {"model": model, "max_completion_tokens": 6}
        client.chat.completions.create(messages=messages, seed=1, **options)
        messages = [{"role": "user", "content": "Bye"}]
        list(client.chat.completions.create(messages=messages, stream=True, **options))


def test_the_turns_of_an_agent_become_data_that_trains_its_model(
    chat_server: Server, sdk: tinker.ServiceClient
) -> None:
    training = sdk.create_lora_training_client(base_model=CHAT_MODEL, rank=4).result()
    path = training.save_weights_for_sampler("recorded").result().path
    session = call(chat_server, "POST", "", json={"model": path}).json()["id"]

    an_agent(f"{chat_server.url}/oai/sessions/{session}/v1", path)
    recorded = call(chat_server, "GET", f"/{session}/datums").json()
    data = []
    for each in recorded["data"]:
        inputs = {name: types.TensorData(**t) for name, t in each["loss_fn_inputs"].items()}
        mask = inputs.pop("mask")
        inputs["advantages"] = types.TensorData(data=mask.data, dtype="float32", shape=mask.shape)
        tokens = each["model_input"]["chunks"][0]["tokens"]
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
        )
    output = training.forward_backward(data, "importance_sampling").result()

    assert recorded["num_turns"] == 2
    for datum, result in zip(data, output.loss_fn_outputs, strict=True):
        sampled = [
            at for at, advantage in enumerate(datum.loss_fn_inputs["advantages"].data) if advantage
        ]
        old, new = datum.loss_fn_inputs["logprobs"].data, result["logprobs"].data
        assert [new[at] for at in sampled] == pytest.approx([old[at] for at in sampled], abs=1e-4)


def test_a_session_belongs_to_its_owner_and_its_model(chat_server: Server) -> None:
    session = call(chat_server, "POST", "", json={"model": CHAT_MODEL}).json()["id"]
    key = chat_server.command("keys", "create", "other", "--owner", "other").split()[-1]
    question: Any = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    chat = f"/{session}/v1/chat/completions"

    other_model = call(chat_server, "POST", chat, json={"model": "gpt-4o", **question})
    stranger = call(chat_server, "GET", f"/{session}/datums", key=key)
    unknown = call(chat_server, "GET", f"/{session}0/datums")

    assert other_model.status_code == 400
    assert "gpt-4o" in other_model.json()["error"]["message"]
    assert stranger.status_code == unknown.status_code == 404
    assert call(chat_server, "DELETE", f"/{session}").status_code == 200
    assert call(chat_server, "GET", f"/{session}/datums").status_code == 404


def test_sessions_are_listed_with_what_they_hold_for_their_owner_only(chat_server: Server) -> None:
    key = chat_server.command("keys", "create", "lister", "--owner", "lister").split()[-1]
    other = chat_server.command("keys", "create", "nobody", "--owner", "nobody").split()[-1]
    first = call(chat_server, "POST", "", key, json={"model": CHAT_MODEL}).json()
    second = call(chat_server, "POST", "", key, json={"model": CHAT_MODEL}).json()
    question = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    chat = f"/{second['id']}/v1/chat/completions"
    usage = call(chat_server, "POST", chat, key, json={"model": CHAT_MODEL, **question}).json()

    listed = call(chat_server, "GET", "", key).json()
    shown = call(chat_server, "GET", f"/{second['id']}", key)

    assert listed["object"] == "list"
    assert [each["id"] for each in listed["data"]] == [first["id"], second["id"]]
    assert [each["num_turns"] for each in listed["data"]] == [0, 1]
    assert listed["data"][1]["num_tokens"] >= usage["usage"]["prompt_tokens"] + 1
    assert shown.json()["num_turns"] == 1
    assert shown.json()["created"] < shown.json()["expires"]
    assert call(chat_server, "GET", "", other).json()["data"] == []
    assert call(chat_server, "GET", f"/{second['id']}", other).status_code == 404


def test_an_agent_that_asks_for_models_finds_the_model_of_its_session(chat_server: Server) -> None:
    session = call(chat_server, "POST", "", json={"model": CHAT_MODEL}).json()["id"]
    url = f"{chat_server.url}/oai/sessions/{session}/v1"

    with openai.OpenAI(base_url=url, api_key=API_KEY, max_retries=0) as client:
        models = [model.id for model in client.models.list()]

    assert models == [CHAT_MODEL]


def test_the_example_trains_an_agent_of_the_openai_package(chat_server: Server) -> None:
    environment = {
        **os.environ,
        "TINKER_BASE_URL": chat_server.url,
        "TINKER_API_KEY": API_KEY,
        "MODEL": CHAT_MODEL,
    }
    result = subprocess.run(
        [sys.executable, "examples/openai_agent.py", "2"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    first, *lines = result.stdout.splitlines()
    assert first == f"Creating a run of {CHAT_MODEL} ..."
    assert [line.split(":")[0] for line in lines] == [
        each
        for step in range(2)
        for each in (
            *(f"episode {number} of step {step}" for number in range(1, 5)),
            f"step {step}",
        )
    ]
