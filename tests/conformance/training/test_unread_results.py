"""Unread results in a shared head only affect their owner, who gets an explanation."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from tinkercloud_testing.clients.raw_run import MODEL, Run, a_tensor
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, Answer, Server, a_server

MAX_RESULT_BYTES = 20_000
READ_ONLY = ("--owner", "bootstrap", "--role", "read-only")
RESULT_BYTES = 8 * 1000 * 4
"""Size of the result of a batch below: logprobs of a thousand targets at each of eight tokens."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Server]:
    """Run a server whose heads keep few results."""
    settings = {
        "TINKERCLOUD_LIMITS__MAX_RESULT_BYTES": str(MAX_RESULT_BYTES),
        "TINKERCLOUD_TIMINGS__LONG_POLL_SECONDS": "1",
    }
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: model_folder}, settings) as running:
        yield running


@pytest.fixture
def eve(small: Server) -> Iterator[Run]:
    """Return a run whose owner reads no results; they are deleted with its session."""
    run = Run(small)
    yield run
    assert small.request("DELETE", f"/api/v1/sessions/{run.session}").status == 200


@pytest.fixture
def bob(small: Server) -> tinker.ServiceClient:
    """Return an SDK client of another owner."""
    return small.client(small.new_key("bob"))


def a_large_batch(run: Run) -> Answer:
    """Send a batch with a small request and a large result."""
    message = run.batch([1] * 8)
    message.forward_only = True
    targets = message.data[0].loss_fn_inputs["target_tokens"]
    targets.CopyFrom(pb.Tensor(dtype=pb.DTYPE_INT64, shape=(8, 1000)))
    targets.sparse_csr.crow_indices = np.zeros(9, "<i8").tobytes()
    return run.train(message.SerializeToString())


def a_sample(session: str, seq_id: int) -> dict[str, Any]:
    chunk = {"type": "encoded_text", "tokens": [1] * 40}
    return {
        "sampling_session_id": session,
        "seq_id": seq_id,
        "prompt": {"chunks": [chunk]},
        "sampling_params": {"max_tokens": 1},
        "topk_prompt_logprobs": 40,
    }


def leave_samples(run: Run, index: int = 0) -> list[str]:
    """Request more samples than results are kept, without reading any; return the request ids."""
    body = {"session_id": run.session, "sampling_session_seq_id": index, "base_model": MODEL}
    created = run.server.post("create_sampling_session", body).json()
    session = str(created["sampling_session_id"])
    sent = [run.server.post("asample", a_sample(session, seq_id)) for seq_id in range(4)]
    assert [answer.status for answer in sent] == [200] * 4
    ids = [str(answer.json()["request_id"]) for answer in sent]
    run.server.result(ids[-1])
    return ids


def leave_results(run: Run) -> list[str]:
    """Run batches without reading their results; return the request ids."""
    sent = [a_large_batch(run)]
    # The result of a later request shows that the batch has run.
    run.outcome(run.send("save_weights", path=f"after-{run.next_seq_id}"))
    return [str(answer.json()["request_id"]) for answer in sent]


def test_unread_results_do_not_affect_another_owner(eve: Run, bob: tinker.ServiceClient) -> None:
    leave_samples(eve)
    leave_results(eve)

    training = bob.create_lora_training_client(MODEL, rank=4).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    text = types.ModelInput.from_ints([1, 2, 3])
    sampled = sampler.sample(text, 2, types.SamplingParams(max_tokens=3)).result()
    datum = types.Datum(
        model_input=text,
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64"),
            "weights": types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32"),
        },
    )
    output = training.forward_backward([datum], "cross_entropy").result()

    assert len(sampled.sequences) == 2
    assert output.metrics["loss:sum"] > 0


def test_more_batches_of_an_owner_are_rejected_until_results_are_read(eve: Run) -> None:
    (left,) = leave_results(eve)
    seq_id = eve.next_seq_id

    refused = a_large_batch(eve)

    assert refused.status == 429
    for words in (left.rpartition(":")[0], "owner 'bootstrap'", f"is {MAX_RESULT_BYTES}"):
        assert words in refused.detail
    output = pb.ForwardBackwardOutput.FromString(eve.server.result(left).body)
    assert len(output.loss_fn_outputs[0].fields["logprobs"].data) == RESULT_BYTES
    eve.next_seq_id = seq_id
    assert a_large_batch(eve).status == 200


def test_a_pending_batch_reports_why_it_is_held_back(eve: Run) -> None:
    eve.next_seq_id = 2
    second = str(a_large_batch(eve).json()["request_id"])
    unread = eve.next_seq_id = 1
    assert a_large_batch(eve).status == 200

    def pending() -> dict[str, Any]:
        return eve.server.post("retrieve_future", {"request_id": second}).json()

    wait_until(lambda: pending()["queue_state"] == "paused_rate_limit", "the batch is held back")
    reason = pending()["queue_state_reason"]
    assert f"request {second} is paused: the unread training results of" in reason
    assert f"bytes for {eve.model_id}" in reason

    eve.server.result(f"{eve.model_id}:{unread}")
    assert pb.ForwardBackwardOutput.FromString(eve.server.result(second).body).metrics


def test_the_sdk_repeats_a_sampling_request_whose_result_was_dropped(
    eve: Run, small: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = leave_samples(eve)[0]
    gone = small.post("retrieve_future", {"request_id": dropped})
    assert gone.status == 410
    assert "owner 'bootstrap'" in gone.detail
    sampler = small.client().create_sampling_client(base_model=MODEL).result()
    send, sent = sampler._send_asample_request, list[int]()

    async def send_the_dropped_one_first(seq_id: int, *arguments: Any) -> types.UntypedAPIFuture:
        sent.append(seq_id)
        future: types.UntypedAPIFuture = await send(seq_id, *arguments)
        if len(sent) == 1:
            future = future.model_copy(update={"request_id": dropped})
        return future

    monkeypatch.setattr(sampler, "_send_asample_request", send_the_dropped_one_first)
    params = types.SamplingParams(max_tokens=3)
    sampled = sampler.sample(types.ModelInput.from_ints([1, 2]), 1, params).result()

    assert len(sent) == 2
    assert sampled.sequences[0].tokens


def test_a_small_batch_with_a_huge_result_fails_in_order(eve: Run) -> None:
    message = eve.batch([1] * 8)
    targets = message.data[0].loss_fn_inputs["target_tokens"]
    targets.CopyFrom(pb.Tensor(dtype=pb.DTYPE_INT64, shape=(8, 2_000_000)))
    targets.sparse_csr.crow_indices = np.zeros(9, "<i8").tobytes()
    body = message.SerializeToString()
    assert len(body) < 400

    failed = eve.outcome(eve.train(body))

    assert "2000000 values per position; at most 1024 are accepted" in str(failed["error"])
    dense = eve.batch([1])
    wide = a_tensor(np.ones((1, 1025), "<i8"))
    dense.data[0].loss_fn_inputs["target_tokens"].CopyFrom(wide)
    failed = eve.outcome(eve.train(dense.SerializeToString()))
    assert "at most 1024" in str(failed["error"])
    assert eve.step() > 0


def test_who_may_only_read_uses_up_no_result_of_a_member(small: Server) -> None:
    made = small.command("keys", "create", "reader", *READ_ONLY, "--json")
    readers = (small.new_key("vic"), str(json.loads(made)["key"]))
    assert small.post("projects", {"project_id": "shared", "name": "Shared"}).status == 200
    path = "/api/v1/projects/shared/members/vic"
    assert small.request("PUT", path, {"role": "viewer"}).status == 200
    made_in = {"sdk_version": "t", "project_id": "shared"}
    session = small.post("create_session", made_in).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = small.post("create_sampling_session", body).json()["sampling_session_id"]

    for number, key in enumerate(readers, 1):
        sent = small.post("asample", a_sample(sampler, number)).json()["request_id"]
        wait_until(partial(_is_shown, small, sent, key), "the result is shown")
        # Results that were read are forgotten.
        small.post("cleanup_futures", {})

        assert _result(small, sent).status == 200


def _result(server: Server, request_id: str, key: str = API_KEY) -> Answer:
    return server.post("retrieve_future", {"request_id": request_id}, key=key)


def _is_shown(server: Server, request_id: str, key: str) -> bool:
    return _result(server, request_id, key).status == 200
