"""Losses that the SDK uploads: they equal the client's own, and fail alone."""

from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tinkercloud_testing.clients.sdk_steps import score
from tinkercloud_testing.serving.servers import Server

torch = pytest.importorskip("torch")

MODEL = "tiny/llama"
TEXT = [5, 6, 7, 8, 9]


def clipped(logprobs: Any, advantages: Any) -> Any:
    """A clipped policy gradient with an entropy-like term, of the whole sequence."""
    ratio = torch.exp(logprobs - logprobs.detach())
    kept = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = -kept.sum() / logprobs.shape[0] + 0.1 * torch.logsumexp(logprobs, dim=0)
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/length:sum": ratio.sum()}


def first_token(logprobs: Any, places: Any) -> Any:
    """A loss that fails for data with places that do not exist."""
    return logprobs.gather(0, places).sum(), {}


def a_datum(length: int = 4, **inputs: Any) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(TEXT[:length]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(TEXT[1 : length + 1])),
            **{name: types.TensorData.from_numpy(value) for name, value in inputs.items()},
        },
    )


def some_data() -> list[types.Datum]:
    return [
        a_datum(length, advantages=np.linspace(-1, 1, length, dtype=np.float32))
        for length in (4, 2, 3)
    ]


def a_model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(MODEL, rank=4, seed=1).result()


RANKS: Any = {"logprobs": 1, "advantages": 1}
STEP = types.AdamParams(learning_rate=0.02)


def test_an_uploaded_loss_equals_the_client_side_one(client: tinker.ServiceClient) -> None:
    handle = client.create_custom_loss(clipped, input_ranks=RANKS).result()
    assert handle.loss_id is not None
    on_server, on_client = a_model(client), a_model(client)

    def client_side(data: list[types.Datum], logprobs: list[Any]) -> Any:
        parts = [
            clipped(lp, datum.loss_fn_inputs["advantages"].to_torch())
            for lp, datum in zip(logprobs, data, strict=True)
        ]
        ratios = [float(metrics["custom/ratio:mean"].detach()) for _, metrics in parts]
        return sum(loss for loss, _ in parts), {"custom/ratio:mean": sum(ratios) / len(ratios)}

    for _ in range(2):
        here = on_server.forward_backward_custom(some_data(), handle).result()
        there = on_client.forward_backward_custom(some_data(), client_side).result()
        on_server.optim_step(STEP).result()
        on_client.optim_step(STEP).result()

        assert here.metrics["loss:sum"] == pytest.approx(there.metrics["loss:sum"], abs=1e-6)
        assert here.metrics["custom/ratio:mean"] == pytest.approx(1.0)
        assert here.metrics["custom/length:sum"] == pytest.approx(9.0)
    np.testing.assert_allclose(score(on_server, TEXT), score(on_client, TEXT), atol=1e-6)


def test_a_loss_that_fails_does_so_alone(server: Server, client: tinker.ServiceClient) -> None:
    handle = client.create_custom_loss(
        first_token, input_ranks={"logprobs": 1, "places": 1}
    ).result()
    training = a_model(client)
    with server.client(server.new_key("another-owner")) as another:
        theirs = a_model(another)
        wrong = training.forward_backward_custom([a_datum(places=np.array([99]))], handle)
        right = theirs.forward_backward([a_datum()], "cross_entropy")

        with pytest.raises(tinker.TinkerError, match="out of bounds"):
            wrong.result()
        assert right.result().metrics["loss:sum"] > 0
    training.forward_backward_custom([a_datum(places=np.array([0]))], handle).result()


def test_a_loss_belongs_to_its_session(server: Server, client: tinker.ServiceClient) -> None:
    handle = client.create_custom_loss(clipped, input_ranks=RANKS).result()
    stranger = server.new_key("a-stranger")

    asked = server.post("retrieve_future", {"request_id": handle.loss_id}, key=stranger)
    with server.client() as other:
        elsewhere = a_model(other).forward_backward(
            some_data(), "custom", {"loss_id": str(handle.loss_id)}
        )
        with pytest.raises(tinker.TinkerError, match="has no loss"):
            elsewhere.result()

    assert asked.status == 404


def test_code_is_not_accepted(server: Server, client: tinker.ServiceClient) -> None:
    a_model(client)
    session = client.holder.get_session_id()
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_function", "name": "n", "target": "builtins.eval", "args": ["1"]},
        {
            "op": "output",
            "name": "output",
            "target": "output",
            "args": [{"tuple": [{"ref": "n"}, {"dict": {}}]}],
        },
    ]
    body = {
        "session_id": session,
        "custom_loss_seq_id": 7,
        "name": "evil",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": nodes},
    }

    answer = server.post("create_custom_loss", body)

    assert answer.status == 400
    assert "is not allowed in a custom loss" in answer.detail


def divided(logprobs: Any, x: Any, y: Any) -> Any:
    """A loss that ends its process where the quotient of two integers overflows."""
    return logprobs.sum() + torch.div(x, y, rounding_mode="trunc").sum(), {}


def step(training: tinker.TrainingClient) -> float:
    """Run a step; return its loss."""
    loss = training.forward_backward([a_datum()], "cross_entropy").result().metrics["loss:sum"]
    training.optim_step(STEP).result()
    return loss


def test_a_loss_that_ends_its_process_fails_its_future_and_others_train_on_in_the_same_head(
    server: Server, client: tinker.ServiceClient
) -> None:
    handle = client.create_custom_loss(
        divided, input_ranks={"logprobs": 1, "x": 1, "y": 1}
    ).result()
    training, undisturbed = a_model(client), a_model(client)
    expected = [step(undisturbed) for _ in range(3)]
    pids = server.head_pids()
    least, ones = np.full(4, -(2**63), np.int64), np.ones(4, np.int64)
    with server.client(server.new_key("another-owner")) as another:
        theirs = a_model(another)
        losses = [step(theirs)]
        for _ in range(2):
            deadly = training.forward_backward_custom([a_datum(x=least, y=-ones)], handle)
            losses.append(step(theirs))

            with pytest.raises(tinker.TinkerError, match=r"custom loss 'divided'.*SIGFPE.*integer"):
                deadly.result()

    assert losses == expected
    assert server.head_pids() == pids
    # The owner continues too, with the same loss.
    right = training.forward_backward_custom([a_datum(x=ones, y=ones)], handle).result()
    training.optim_step(STEP).result()
    assert np.isfinite(right.metrics["loss:sum"])
