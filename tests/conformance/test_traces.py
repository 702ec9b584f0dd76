"""The trace of a session shows the wait and the execution of each of its requests."""

import json
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

import pytest
import tinker
from tinker import types

from tinkercloud_testing.sdk_steps import step
from tinkercloud_testing.servers import Server

MODEL = "tiny/llama"
PROMPT = types.ModelInput.from_ints([5, 6, 7])


def test_a_trace_has_a_span_for_each_request(server: Server, client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    for _ in range(2):
        step(training)
    sampler = training.save_weights_and_get_sampling_client().result()
    for _ in range(3):
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2, stop=[])).result()
    session = client.holder.get_session_id()

    url = server.rest().export_session_trace(session).result()
    with urllib.request.urlopen(url) as answer:
        trace: dict[str, Any] = json.load(answer)

    events = trace["traceEvents"]
    tracks = {each["args"]["name"]: each["pid"] for each in events if each["ph"] == "M"}
    started = Counter(each["name"] for each in events if each["ph"] == "b")
    assert tracks.keys() == {training.model_id, sampler._sampling_session_id}
    assert started == {
        "forward_backward": 2,
        "optim_step": 2,
        "save_weights_for_sampler": 1,
        "sample": 3,
        "queue": 8,
    }
    starts = {(e["id"], e["name"]): e["ts"] for e in events if e["ph"] == "b"}
    ends = {(e["id"], e["name"]): e["ts"] for e in events if e["ph"] == "e"}
    assert starts.keys() == ends.keys()
    assert all(starts[key] <= ends[key] for key in starts)
    waited = {number: ts for (number, name), ts in ends.items() if name == "queue"}
    assert all(waited[number] <= ts for (number, name), ts in starts.items() if name != "queue")


def test_a_trace_is_its_owners(server: Server, client: tinker.ServiceClient) -> None:
    client.create_lora_training_client(MODEL, rank=4).result()
    session = client.holder.get_session_id()
    stranger = server.new_key("a-stranger")

    asked = server.request("GET", f"/api/v1/sessions/{session}/trace_export", key=stranger)
    url = server.rest().export_session_trace(session).result()
    token = url.rpartition("/")[2]

    assert asked.status == 404
    assert server.request("GET", "/api/v1/sessions", key=token).status == 401
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url[:-4] + "AAAA")
