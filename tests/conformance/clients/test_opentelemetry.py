"""Spans for an OpenTelemetry collector: complete if it responds, harmless if it does not."""

import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import tinker
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.collectors import Collector, a_collector
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server

pytestmark = pytest.mark.slow

MODEL = "tiny/llama"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
SHOWS_IMPORTS = {"PYTHONPROFILEIMPORTTIME": "1"}
ATTRIBUTES = {
    "tinkercloud-api": {
        "http.request.method",
        "http.response.status_code",
        "http.route",
        "tinkercloud.http_request_id",
        "tinkercloud.owner",
    },
    "tinkercloud-head": {
        "error.type",
        "tinkercloud.http_request_id",
        "tinkercloud.owner",
        "tinkercloud.target",
        "tinkercloud.tokens",
    },
}
SENDING = {"opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"}
DROPPED = "spans are dropped until the OpenTelemetry collector"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with a_collector() as running:
        yield running


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, collector: Collector
) -> Iterator[Server]:
    settings = {"TINKERCLOUD_OTLP_ENDPOINT": collector.url, **SOON}
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: model_folder}, settings) as running:
        yield running


@pytest.fixture
def trace(server: Server) -> tuple[str, str]:
    """Return the ids of a trace and of a span of a client."""
    return secrets.token_hex(16), secrets.token_hex(8)


@pytest.fixture
def training(server: Server, trace: tuple[str, str]) -> Iterator[tinker.TrainingClient]:
    """Return a client whose requests belong to its trace."""
    headers = {"traceparent": f"00-{trace[0]}-{trace[1]}-01"}
    with tinker.ServiceClient(
        base_url=server.url, api_key=API_KEY, default_headers_overrides=headers
    ) as client:
        yield client.create_lora_training_client(MODEL, rank=4).result()


def head_logs(server: Server) -> str:
    return "".join(path.read_text() for path in (server.state_dir / "heads").glob("*/head.log"))


def imported(log: str) -> set[str]:
    """Return the modules that a process imported, which Python writes into its log."""
    return set(re.findall(r"^import time:.*\|\s*(\S+)$", log, re.MULTILINE))


def test_a_step_has_spans_of_the_server_and_of_the_head_in_the_trace_of_its_client(
    collector: Collector, training: tinker.TrainingClient, trace: tuple[str, str]
) -> None:
    step(training)

    kinds = ("forward_backward", "optim_step")
    own = collector.of_trace(trace[0], *kinds, *(f"POST /api/v1/{kind}" for kind in kinds))
    by_id = {each.span.span_id: each for each in own}
    for kind in kinds:
        [asked] = [each for each in own if each.name == f"POST /api/v1/{kind}"]
        [ran] = [each for each in own if each.name == kind]
        assert (asked.service, ran.service) == ("tinkercloud-api", "tinkercloud-head")
        assert asked.span.parent_span_id.hex() == trace[1]
        assert asked.span.kind == Span.SPAN_KIND_SERVER
        assert by_id[ran.span.parent_span_id] is asked
        [waited] = [
            each
            for each in own
            if each.name == "queue" and each.span.parent_span_id == asked.span.span_id
        ]
        assert waited.span.end_time_unix_nano == ran.span.start_time_unix_nano
        assert asked.span.start_time_unix_nano <= waited.span.start_time_unix_nano
        assert ran.span.end_time_unix_nano > ran.span.start_time_unix_nano
        assert asked.attributes["http.response.status_code"] == 200
        assert ran.attributes["tinkercloud.target"] == training.model_id
        assert (
            ran.attributes["tinkercloud.http_request_id"]
            == asked.attributes["tinkercloud.http_request_id"]
        )
        assert {each.span.status.code for each in (asked, waited, ran)} == {
            Status.STATUS_CODE_UNSET
        }
    [batch] = [each for each in own if each.name == "forward_backward"]
    assert batch.attributes["tinkercloud.tokens"] == 4


def test_a_failed_request_is_an_error_of_the_head_and_no_span_has_keys_or_content(
    collector: Collector, server: Server, training: tinker.TrainingClient, trace: tuple[str, str]
) -> None:
    said = "said-by-the-client"
    chunk = {"type": "encoded_text", "tokens": [5, 10**6]}
    batch = {
        "model_id": training.model_id,
        "seq_id": 1,
        "forward_backward_input": {
            "data": [{"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {}}],
            "loss_fn": "cross_entropy",
        },
    }
    placed = {"traceparent": f"00-{trace[0]}-{trace[1]}-01"}
    sent = server.request("POST", "/api/v1/forward_backward", batch, headers=placed)
    failed = server.result(str(sent.json()["request_id"])).json()
    path = f"/api/v1/runs/{said}/timeline?key={said}"
    server.request("GET", path, headers={**placed, "x-note": said})
    server.request("GET", "/api/v1/get_server_capabilities", key=f"tml-{said}", headers=placed)

    assert "1000000" in failed["error"]
    shown = "GET /api/v1/runs/{run_id}/timeline"
    own = collector.of_trace(trace[0], "forward_backward", shown, "GET other")
    [ran] = [each for each in own if each.name == "forward_backward"]
    assert ran.span.status == Status(code=Status.STATUS_CODE_ERROR)
    assert ran.attributes["error.type"] == "InvalidRequest"
    answers = {each.name: each.attributes.get("http.response.status_code") for each in own}
    assert (answers[shown], answers["GET other"]) == (404, 401)
    for each in collector.spans:
        assert set(each.attributes) <= ATTRIBUTES[each.service]
        assert not each.span.events
        assert not each.span.status.message
    everything = b"".join(collector.bodies)
    assert not [word for word in (API_KEY, said, "1000000") if word.encode() in everything]


def test_a_collector_that_refuses_spans_is_one_line_of_each_log_and_is_asked_again(
    collector: Collector, server: Server, training: tinker.TrainingClient, trace: tuple[str, str]
) -> None:
    collector.status, before = 500, collector.refused
    while collector.refused < before + 6:
        step(training)
    collector.status = 200
    step(training)
    for kind in ("optim_step", "POST /api/v1/optim_step"):
        collector.of_trace(trace[0], kind)

    assert server.log.count(DROPPED) == 1
    assert "reason: " in server.log
    assert head_logs(server).count(DROPPED) == 1


def test_requests_do_not_wait_for_a_collector_that_does_not_answer(
    collector: Collector, training: tinker.TrainingClient
) -> None:
    collector.may_answer.clear()
    try:
        while collector.waiting < 2:
            step(training)
        held = collector.waiting
        step(training)
    finally:
        collector.may_answer.set()

    assert held >= 2


@pytest.mark.long
def test_programs_that_send_no_spans_do_not_load_what_sends_them(
    collector: Collector, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fork of the warm Python has no imports to show.
    monkeypatch.setattr(Server, "warm_python", None)

    def imports_with(name: str, settings: Mapping[str, str]) -> tuple[set[str], set[str]]:
        settings = {**settings, **SHOWS_IMPORTS}
        with a_server(tmp_path / name, {MODEL: model_folder}, settings) as server:
            step(server.client().create_lora_training_client(MODEL, rank=4).result())
            return imported(server.log), imported(head_logs(server))

    sending = imports_with("sending", {"TINKERCLOUD_OTLP_ENDPOINT": collector.url, **SOON})
    of_server, of_head = imports_with("silent", {})

    assert all(imports >= SENDING for imports in sending)
    assert "asyncio" in of_server & of_head
    assert not of_server & SENDING
    # FastAPI imports the package with the interfaces.
    assert not [name for name in of_head if name.startswith("opentelemetry")]
