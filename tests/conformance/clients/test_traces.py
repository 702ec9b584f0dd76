"""The trace of a session shows the wait and the execution of each of its requests."""

import urllib.error
import urllib.request
from collections import Counter, defaultdict

import pytest
import tinker
from tinker import types

from tinkercloud_api.routes.sessions.traces import trace_of
from tinkercloud_protocol.heads.request_timeline import Span
from tinkercloud_testing.clients.sdk_clients import sampling_session_of
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.perfetto import opened_by_perfetto
from tinkercloud_testing.serving.servers import Server

MODEL = "tiny/llama"
PROMPT = types.ModelInput.from_ints([5, 6, 7])


def test_perfetto_shows_the_wait_and_the_execution_of_each_request(
    server: Server, client: tinker.ServiceClient
) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    for _ in range(2):
        step(training)
    sampler = training.save_weights_and_get_sampling_client().result()
    parameters = types.SamplingParams(max_tokens=2, stop=[])
    for future in [sampler.sample(PROMPT, 1, parameters) for _ in range(3)]:
        future.result()
    url = server.rest().export_session_trace(client.holder.get_session_id()).result()
    with urllib.request.urlopen(url) as answer:
        content = answer.read()

    with opened_by_perfetto(content) as trace:
        faults = trace.query("SELECT name FROM stats WHERE severity != 'info' AND value > 0")
        spans = trace.query(
            "INCLUDE PERFETTO MODULE slices.with_context;"
            " SELECT process_name, name, ts, dur, depth FROM process_slice"
        )
        (all_spans,) = trace.query("SELECT count(*) AS number FROM slice")
        counters = trace.query(
            "SELECT track.name, value FROM counter JOIN process_counter_track AS track"
            " ON counter.track_id = track.id JOIN process USING (upid)"
            " WHERE process.name = 'all requests' ORDER BY ts"
        )

    model, samples = training.model_id, sampling_session_of(sampler)
    assert faults == []
    assert all_spans["number"] == len(spans)
    assert Counter((span["process_name"], span["name"]) for span in spans) == {
        (model, "forward_backward"): 2,
        (model, "optim_step"): 2,
        (model, "save_weights_for_sampler"): 1,
        (model, "queue"): 5,
        (samples, "sample"): 3,
        (samples, "queue"): 3,
    }
    executions = [span for span in spans if span["name"] != "queue"]
    waits = [span for span in spans if span["name"] == "queue"]
    assert all(span["dur"] > 0 for span in executions)
    assert all(span["dur"] >= 0 for span in waits)
    assert sorted((wait["process_name"], wait["ts"] + wait["dur"]) for wait in waits) == sorted(
        (span["process_name"], span["ts"]) for span in executions
    )
    values: defaultdict[str, list[float]] = defaultdict(list)
    for counter in counters:
        values[counter["name"]].append(counter["value"])
    assert {"tokens per second", "latency p50 ms", "latency p95 ms"} <= set(values)
    assert (values["requests waiting"][-1], values["requests running"][-1]) == (0, 0)
    assert values["total requests"] == [1, 2, 3, 4, 5, 6, 7, 8]
    # Each step trains four tokens. Each sample computes two, and its prompt unless that is cached.
    assert values["total tokens"][:5] == [4, 4, 8, 8, 8]
    assert 8 + 3 * 2 < values["total tokens"][-1] <= 8 + 3 * 5
    # Overlapping spans are drawn in different rows: none is taken for a part of another.
    assert {span["depth"] for span in spans} == {0}


def test_perfetto_shows_where_the_limits_of_its_owner_paused_a_request() -> None:
    times = {"accepted": 10.0, "started": 14.0, "finished": 15.0}
    spans = [
        Span(target="s:train:0", name="forward_backward", request="req_1", **times, paused=3.0),
        # A head that counts more than the wait.
        Span(target="s:sample:0", name="sample", **times, paused=99.0),
        Span(target="s:train:1", name="forward_backward", **times),
    ]

    with opened_by_perfetto(trace_of(spans)) as trace:
        faults = trace.query("SELECT name FROM stats WHERE severity != 'info' AND value > 0")
        events = trace.query(
            "INCLUDE PERFETTO MODULE slices.with_context;"
            " SELECT process_name, ts, dur,"
            " EXTRACT_ARG(arg_set_id, 'args.paused_seconds') AS paused,"
            " EXTRACT_ARG(arg_set_id, 'args.request_id') AS request"
            " FROM process_slice WHERE name = 'rate limit' ORDER BY ts DESC"
        )

    assert faults == []
    assert [(each["process_name"], each["dur"], each["paused"]) for each in events] == [
        ("s:train:0", 0, 3.0),
        ("s:sample:0", 0, 4.0),
    ]
    assert [(each["ts"], each["request"]) for each in events] == [(11e9, "req_1"), (10e9, None)]


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
