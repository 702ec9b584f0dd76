"""Spans of the ranks of a trainer, in the trace of the request that they computed for."""

import secrets
from collections.abc import Iterator

import pytest
import tinker

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.collectors import Collector, Received, a_collector
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "tiny/llama"
PATIENCE = 600
"""Seconds until ranks have loaded a model."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with a_collector() as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    folder = save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")
    two_ranks = {
        "TINKERCLOUD_TRAINER__RANKS": "2",
        "TINKERCLOUD_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: folder}, two_ranks) as running:
        yield running


def below(spans: list[Received], name: str) -> list[Received]:
    """Return the spans whose parent is the one with a name."""
    [parent] = [each for each in spans if each.name == name]
    return [each for each in spans if each.span.parent_span_id == parent.span.span_id]


@pytest.mark.long
def test_a_step_has_spans_of_rank_0_and_of_the_slowest_below_its_execution(
    collector: Collector, server: Server
) -> None:
    trace = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"}
    with tinker.ServiceClient(
        base_url=server.url, api_key=API_KEY, default_headers_overrides=headers
    ) as client:
        training = client.create_lora_training_client(MODEL, rank=4).result(PATIENCE)
        step(training)

    spans = collector.of_trace(trace, "forward_backward", "rank optim_step")

    [execution] = [each for each in spans if each.name == "forward_backward"]
    passes, steps = below(spans, "forward_backward"), below(spans, "optim_step")
    assert {each.name for each in passes} == {"rank forward_backward"}
    assert {each.name for each in steps} == {"rank sum_gradient", "rank optim_step"}
    for each in (*passes, *steps):
        assert each.service == "tinkercloud-head"
        assert each.attributes["tinkercloud.target"] == training.model_id
    assert passes[0].attributes["tinkercloud.rank"] == 0
    assert {each.attributes["tinkercloud.rank"] for each in passes} <= {0, 1}
    for each in passes:
        # Ranks of this machine have the clock of the head.
        assert execution.span.start_time_unix_nano <= each.span.start_time_unix_nano
        assert each.span.end_time_unix_nano <= execution.span.end_time_unix_nano
