"""The metrics of a server that the SDK uses."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import tinker

from tinkercloud_testing.clients.sdk_steps import a_datum
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server

MODEL = "tiny/llama"
REQUESTS = "tinkercloud_http_requests_total"


def test_a_training_step_is_counted_at_every_stage(
    server: Server, client: tinker.ServiceClient
) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    step = {"route": "/api/v1/forward_backward", "status": "200"}
    requests = server.metric(REQUESTS, **step)
    sent = server.metric("tinkercloud_proxy_bytes_total", direction="to_head")
    returned = server.metric("tinkercloud_proxy_bytes_total", direction="from_head")

    training.forward_backward([a_datum()], "cross_entropy").result()

    assert server.metric(REQUESTS, **step) == requests + 1
    assert server.metric("tinkercloud_http_request_seconds_count", route=step["route"]) >= 1
    assert server.metric("tinkercloud_proxy_bytes_total", direction="to_head") > sent
    assert server.metric("tinkercloud_proxy_bytes_total", direction="from_head") > returned


def test_a_head_counts_how_long_requests_wait_and_run(
    server: Server, client: tinker.ServiceClient
) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()
    request = {"request": "forward_backward"}
    waited = server.head_metric("tinkercloud_request_wait_seconds_count", **request)
    ran = server.head_metric("tinkercloud_request_seconds_count", **request)
    owned = server.head_metric("tinkercloud_owner_requests_total", owner="bootstrap")
    seconds = server.head_metric("tinkercloud_request_seconds_sum", **request)

    training.forward_backward([a_datum()], "cross_entropy").result()

    assert server.head_metric("tinkercloud_request_wait_seconds_count", **request) == waited + 1
    assert server.head_metric("tinkercloud_request_seconds_count", **request) == ran + 1
    assert server.head_metric("tinkercloud_owner_requests_total", owner="bootstrap") == owned + 1
    assert server.head_metric("tinkercloud_request_seconds_sum", **request) > seconds


def test_a_head_counts_the_wait_for_the_first_token_of_an_answer_once(server: Server) -> None:
    counted = server.head_metric("tinkercloud_first_token_seconds_count")
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 4, "stream": True}

    answer = server.request("POST", "/oai/api/v1/completions", body)

    assert answer.status == 200, answer.body
    assert server.head_metric("tinkercloud_first_token_seconds_count") == counted + 1


def test_prometheus_finds_the_heads_of_a_local_server(server: Server) -> None:
    port = f"http://127.0.0.1:{server.metrics_port}"

    (group,) = httpx.get(f"{port}/heads").json()
    answers = [httpx.get(f"http://{target}/metrics") for target in group["targets"]]

    assert answers
    assert all("tinkercloud_request_seconds" in answer.text for answer in answers)


def test_client_supplied_path_segments_create_no_time_series(server: Server) -> None:
    known = {"route": "/api/v1/sessions/{session_id}", "status": "404"}
    unknown = {"route": "other", "status": "404"}
    before = server.metric(REQUESTS, **known), server.metric(REQUESTS, **unknown)

    server.request("GET", "/api/v1/sessions/of-somebody")
    server.request("GET", "/api/v1/sessions/of-somebody-else")
    server.request("GET", "/no/such/path")

    after = server.metric(REQUESTS, **known), server.metric(REQUESTS, **unknown)
    assert after == (before[0] + 2, before[1] + 1)


def test_the_port_of_the_api_shows_no_metrics(server: Server) -> None:
    assert server.request("GET", "/metrics").status == 404
    assert server.metric("tinkercloud_catalog_errors_total") == 0


def test_clients_waiting_for_a_result_are_counted(
    server: Server, client: tinker.ServiceClient
) -> None:
    training = client.create_lora_training_client(MODEL, rank=4).result()

    def send(seq_id: int) -> dict[str, Any]:
        body = {"model_id": training.model_id, "seq_id": seq_id, "adam_params": {}}
        return server.post("optim_step", {**body, "type": "optim_step"}).json()

    behind_a_gap = send(2)

    with ThreadPoolExecutor() as pool:
        request = {"request_id": behind_a_gap["request_id"]}
        poll = pool.submit(server.post, "retrieve_future", request)
        wait_until(lambda: server.metric("tinkercloud_long_polls") >= 1, "a long poll")
        send(1)
        answer = poll.result()

    assert answer.status == 200
