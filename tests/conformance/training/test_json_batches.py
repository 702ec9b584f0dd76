"""Training and sampling in JSON over plain HTTP gives what the SDK gives, bit for bit."""

from typing import Any

import numpy as np
import tinker
from tinker import types

from tinkercloud_testing.serving.servers import Answer, Server

MODEL = "tiny/llama"
TOKENS = [10, 11, 12, 20, 21, 30]
TARGETS = [11, 12, 20, 21, 30, 31]
WEIGHTS = [0.0, 0.5, 1.0, 1.0, 0.1, 1.0]
LEARNING_RATE = 0.01


class PlainHttp:
    """A training run over plain HTTP: JSON without seq_id."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.session = str(server.post("create_session", {"sdk_version": "t"}).json()["session_id"])
        created = self.result(
            server.post(
                "create_model",
                {
                    "session_id": self.session,
                    "model_seq_id": 0,
                    "base_model": MODEL,
                    "lora_config": {"rank": 4, "seed": 1},
                },
            )
        )
        self.model_id = str(created["model_id"])

    def result(self, answer: Answer) -> dict[str, Any]:
        """Return the result of the future of an accepted request, in JSON."""
        assert answer.status == 200, answer.body
        request_id = str(answer.json()["request_id"])
        return self.server.result(request_id, accept="application/json").json()

    def send(self, path: str, /, **fields: object) -> dict[str, Any]:
        """Send a request for the model; return its result."""
        return self.result(self.server.post(path, {**fields, "model_id": self.model_id}))

    def sampler(self) -> str:
        """Publish the weights to a new sampling session."""
        published = self.send("save_weights_for_sampler", sampling_session_seq_id=0)
        return str(published["sampling_session_id"])


def test_json_over_plain_http_is_the_sdk_bit_for_bit(
    server: Server, client: tinker.ServiceClient
) -> None:
    plain = PlainHttp(server)
    training = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=TARGETS, dtype="int64", shape=[6]),
            "weights": types.TensorData(data=WEIGHTS, dtype="float32", shape=[6]),
        },
    )
    data = [
        {
            "model_input": {"input_ids": TOKENS},
            "loss_fn_inputs": {
                "target_tokens": TARGETS,
                "weights": {"data": WEIGHTS, "dtype": "float64"},
            },
        }
    ]

    for _ in range(3):
        ours = plain.send("forward_backward", data=data, loss_fn="cross_entropy")
        theirs = training.forward_backward([datum], "cross_entropy").result()
        assert ours["metrics"] == theirs.metrics
        for name in ("logprobs", "elementwise_loss"):
            sdk = theirs.loss_fn_outputs[0][name]
            assert ours["loss_fn_outputs"][0][name] == {
                "data": sdk.to_numpy().tolist(),
                "dtype": "float32",
                "shape": [6],
            }
        applied = plain.send("optim_step", adam_params={"learning_rate": LEARNING_RATE})
        step = training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)).result()
        assert applied["metrics"] == step.metrics

    ours = plain.result(
        server.post(
            "asample",
            {
                "sampling_session_id": plain.sampler(),
                "prompt": {"chunks": [{"tokens": TOKENS[:3]}]},
                "num_samples": 2,
                "sampling_params": {"max_tokens": 5, "seed": 7},
                "prompt_logprobs": True,
                "topk_prompt_logprobs": 2,
            },
        )
    )
    sampler = training.save_weights_and_get_sampling_client().result()
    response = sampler.sample(
        types.ModelInput.from_ints(TOKENS[:3]),
        num_samples=2,
        sampling_params=types.SamplingParams(max_tokens=5, seed=7),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
    ).result()
    assert ours["sequences"] == [
        {
            "tokens": list(sequence.tokens),
            "logprobs": sequence.logprobs,
            "stop_reason": sequence.stop_reason,
            "finish_reason": sequence.stop_reason,
        }
        for sequence in response.sequences
    ]
    assert ours["prompt_logprobs"] == response.prompt_logprobs
    assert response.topk_prompt_logprobs is not None
    assert ours["topk_prompt_logprobs"] == [
        None if row is None else [list(cell) for cell in row]
        for row in response.topk_prompt_logprobs
    ]
    assert ours["prompt_logprobs"][0] is None


def test_the_loss_of_every_target_of_a_policy_loss_adds_up_to_the_loss(server: Server) -> None:
    plain = PlainHttp(server)
    inputs = {
        "target_tokens": TARGETS,
        "logprobs": [-5.0] * 6,
        "advantages": [1.0, -1.0, 0.5, 2.0, 0.0, 1.0],
        "sequence_ratio_mask": [True, True, False, True, True, True],
    }
    data = [{"model_input": TOKENS, "loss_fn_inputs": inputs}] * 2

    output = plain.send("forward_backward", data=data, loss_fn="gspo")

    losses = [each["elementwise_loss"]["data"] for each in output["loss_fn_outputs"]]
    assert [len(each) for each in losses] == [6, 6]
    np.testing.assert_allclose(np.sum(losses), output["metrics"]["loss:sum"], rtol=1e-5)


def test_a_checkpoint_without_name_and_number_is_listed_under_its_name(server: Server) -> None:
    plain = PlainHttp(server)
    plain.send("optim_step", adam_params={})
    key = {"X-Idempotency-Key": "once"}
    body = {"model_id": plain.model_id, "ttl_seconds": 3600}
    answers = [server.request("POST", "/api/v1/save_weights", body, headers=key) for _ in range(2)]

    saved = [plain.result(answer)["path"] for answer in answers]
    listed = server.request("GET", f"/api/v1/training_runs/{plain.model_id}/checkpoints").json()
    loaded = plain.send("load_weights", path=saved[0], optimizer=True)

    assert saved == [f"tinker://{plain.model_id}/weights/step-000002"] * 2
    assert [each["tinker_path"] for each in listed["checkpoints"]] == saved[:1]
    assert loaded["path"] == saved[0]


def test_an_old_sdks_batches_run_by_their_numbers(server: Server) -> None:
    plain = PlainHttp(server)
    datum = {"loss_fn_inputs": {"target_tokens": TARGETS}, "model_input": {"chunks": []}}
    batch = {"data": [{**datum, "model_input": TOKENS}], "loss_fn": "cross_entropy"}
    step = {"adam_params": {}, "model_id": plain.model_id, "seq_id": 3}
    invalid = {"data": [datum], "loss_fn": "cross_entropy"}

    last = server.post("optim_step", step)
    second = {"forward_backward_input": invalid, "model_id": plain.model_id, "seq_id": 2}
    refused = server.post("forward_backward", second)
    first = {"forward_backward_input": batch, "model_id": plain.model_id, "seq_id": 1}
    accepted = server.post("forward_backward", first)

    assert plain.result(accepted)["metrics"]["loss:sum"] > 0
    assert "must have 1 to" in plain.result(refused)["error"]
    assert "not applied" in plain.result(last)["error"]
    assert "error" not in plain.send("optim_step", adam_params={})
