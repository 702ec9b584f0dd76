"""Training as researchers do it with the unmodified SDK: start, train, evaluate."""

from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tinkercloud_testing.clients.sdk_steps import a_text
from tinkercloud_testing.serving.servers import Server

MODEL = "tiny/llama"
PAIRS = [([10, 11, 12], [20, 21]), ([30, 31], [40, 41, 42, 43]), ([50], [60])]


def a_datum(prompt: list[int], completion: list[int]) -> types.Datum:
    tokens = [*prompt, *completion]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(completion)
    return a_text(tokens, weights=weights)


DATA = [a_datum(*pair) for pair in PAIRS]


def a_training_client(client: tinker.ServiceClient, **options: Any) -> tinker.TrainingClient:
    options = {"rank": 4, "seed": 1, **options}
    return client.create_lora_training_client(base_model=MODEL, **options).result()


def loss_of(result: types.ForwardBackwardOutput) -> float:
    return result.metrics["loss:sum"]


def norm_of(result: types.OptimStepResponse) -> float:
    assert result.metrics is not None
    return result.metrics["grad_norm"]


def test_the_startup_sequence_returns_a_model_description(client: tinker.ServiceClient) -> None:
    training = a_training_client(client)

    info = training.get_info()

    assert info.model_id == f"{training.holder.get_session_id()}:train:0"
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (MODEL, True, 4)
    assert training.get_tokenizer().encode("Hi") == [39, 72]


def test_supervised_steps_lower_the_loss(client: tinker.ServiceClient) -> None:
    training = a_training_client(client)

    losses = []
    for _ in range(8):
        step = training.forward_backward(DATA, "cross_entropy")
        applied = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(loss_of(step.result()))
        applied.result()

    assert losses[-1] < 0.5 * losses[0]


def test_logprobs_are_returned_for_every_target_in_request_order(
    client: tinker.ServiceClient,
) -> None:
    training = a_training_client(client)

    together = training.forward(DATA, "cross_entropy").result()
    alone = [training.forward([datum], "cross_entropy").result() for datum in DATA]

    assert [len(output["logprobs"].data) for output in together.loss_fn_outputs] == [4, 5, 1]
    for one, other in zip(together.loss_fn_outputs, alone, strict=True):
        np.testing.assert_allclose(
            one["logprobs"].data, other.loss_fn_outputs[0]["logprobs"].data, atol=1e-5
        )


@pytest.mark.parametrize("method", ["forward", "forward_backward"])
def test_cross_entropy_reports_the_loss_of_every_target(
    client: tinker.ServiceClient, method: str
) -> None:
    training = a_training_client(client)
    unweighted = a_text([70, 71, 72])

    result = getattr(training, method)([*DATA, unweighted], "cross_entropy").result()

    for datum, output in zip([*DATA, unweighted], result.loss_fn_outputs, strict=True):
        losses, logprobs = output["elementwise_loss"], output["logprobs"]
        weights = datum.loss_fn_inputs.get("weights")
        assert losses.dtype == "float32"
        assert losses.shape == datum.loss_fn_inputs["target_tokens"].shape
        np.testing.assert_array_equal(
            losses.to_numpy(), -logprobs.to_numpy() * (1 if weights is None else weights.to_numpy())
        )
    # Its first targets belong to a prompt and have weight zero.
    assert result.loss_fn_outputs[0]["elementwise_loss"].data[:2] == [0, 0]
    total = sum(sum(output["elementwise_loss"].data) for output in result.loss_fn_outputs)
    assert loss_of(result) == pytest.approx(total, rel=1e-5)


def test_a_policy_loss_reports_only_logprobs(client: tinker.ServiceClient) -> None:
    training = a_training_client(client)
    sampled = a_text([5, 6, 7], logprobs=[-1.0, -1.0], advantages=[1.0, 1.0])

    result = training.forward_backward([sampled], "importance_sampling").result()

    assert result.loss_fn_outputs[0].keys() == {"logprobs"}


POLICY_LOSSES: dict[types.LossFnType, dict[str, float]] = {
    "importance_sampling": {},
    "ppo": {},
    "cispo": {},
    "dro": {"beta": 0.1},
    "gspo": {},
}


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
def test_unused_weights_and_masks_of_a_policy_loss_are_counted_and_have_no_effect(
    client: tinker.ServiceClient, loss_fn: types.LossFnType
) -> None:
    training = a_training_client(client)
    used = {"logprobs": [-1.0, -2.0], "advantages": [1.0, -1.0]}
    if loss_fn == "gspo":
        used["sequence_ratio_mask"] = [1.0, 1.0]
    plain = a_text([5, 6, 7], **used)
    with_both = a_text([5, 6, 7], **used, weights=[0.5, 0.0], mask=[0.0, 1.0])
    with_one = a_text([5, 6, 7], **used, weights=[3.0, 3.0])

    def loss(*data: types.Datum) -> types.ForwardBackwardOutput:
        return training.forward_backward(list(data), loss_fn, POLICY_LOSSES[loss_fn]).result()

    expected, got = loss(plain, plain), loss(with_both, with_one)

    assert loss_of(got) == loss_of(expected)
    unused = {name: value for name, value in got.metrics.items() if name.startswith("unused")}
    assert unused == {"unused_weights:sum": 2, "unused_mask:sum": 1}
    assert not [name for name in expected.metrics if name.startswith("unused")]


def test_gspo_with_default_settings_clips_like_ppo(client: tinker.ServiceClient) -> None:
    training = a_training_client(client)
    # The request of the cookbook's rl_loop, with samples whose ratio is far above every bound.
    sampled = a_text(
        [5, 6, 7], logprobs=[-30.0, -30.0], advantages=[1.0, 1.0], sequence_ratio_mask=[0.0, 1.0]
    )

    result = training.forward_backward([sampled], "gspo").result()

    assert loss_of(result) == pytest.approx(-2 * 1.2, rel=1e-5)


def test_a_pipelined_step_uses_the_weights_of_the_previous_one(
    client: tinker.ServiceClient,
) -> None:
    pipelined, waiting = a_training_client(client), a_training_client(client)
    adam = types.AdamParams(learning_rate=1e-2)

    passed, applied = [], []
    for _ in range(5):
        passed.append(pipelined.forward_backward(DATA, "cross_entropy"))
        applied.append(pipelined.optim_step(adam))
    expected = []
    for _ in range(5):
        expected.append(loss_of(waiting.forward_backward(DATA, "cross_entropy").result()))
        waiting.optim_step(adam).result()

    assert [loss_of(future.result()) for future in passed] == expected
    assert all(norm_of(future.result()) > 0 for future in applied)


@pytest.mark.long
def test_requests_after_a_large_response_are_not_delayed(
    server: Server, client: tinker.ServiceClient
) -> None:
    training = a_training_client(client)
    data = [a_datum([1, 2], [3] * 500)] * 310
    before = server.metric("tinkercloud_proxy_errors_total")

    for _ in range(2):
        result = training.forward_backward(data, "cross_entropy").result()
        training.optim_step(types.AdamParams()).result()
        num_bytes = sum(4 * len(output["logprobs"].data) for output in result.loss_fn_outputs)
        assert num_bytes > 600 << 10

    assert server.metric("tinkercloud_proxy_errors_total") == before


def test_forward_does_not_change_the_gradient(client: tinker.ServiceClient) -> None:
    one, other = a_training_client(client), a_training_client(client)
    adam = types.AdamParams(learning_rate=1e-2)

    for training in (one, other):
        training.forward_backward(DATA, "cross_entropy").result()
        if training is one:
            training.forward(DATA, "cross_entropy").result()
        training.optim_step(adam).result()

    after = [loss_of(training.forward(DATA, "cross_entropy").result()) for training in (one, other)]
    assert after[0] == after[1]


def test_a_call_split_in_parallel_chunks_equals_one_call(
    client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = client.holder
    whole, split = a_training_client(client), a_training_client(client)
    data = DATA * 4

    one_call = whole.forward_backward(data, "cross_entropy").result()
    small_chunks = holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 5})
    monkeypatch.setattr(holder, "_client_config", small_chunks)
    chunks = split.forward_backward(data, "cross_entropy").result()
    adam = types.AdamParams(learning_rate=1e-2)
    norms = [norm_of(training.optim_step(adam).result()) for training in (whole, split)]

    assert loss_of(chunks) == pytest.approx(loss_of(one_call), rel=1e-6)
    for result in (one_call, chunks):
        assert result.metrics["loss:mean"] == pytest.approx(loss_of(result) / len(data), rel=1e-6)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for one, other in zip(one_call.loss_fn_outputs, chunks.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"].data, other["logprobs"].data, atol=1e-5)


def test_gradients_accumulate_until_the_optimizer_step(client: tinker.ServiceClient) -> None:
    once, parts = a_training_client(client), a_training_client(client)
    adam = types.AdamParams(learning_rate=1e-2)

    once.forward_backward(DATA, "cross_entropy").result()
    for datum in DATA:
        parts.forward_backward([datum], "cross_entropy").result()
    norms = [norm_of(training.optim_step(adam).result()) for training in (once, parts)]

    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_custom_loss_on_the_client_has_the_same_gradient_as_the_built_in_one(
    client: tinker.ServiceClient,
) -> None:
    custom, built_in = a_training_client(client), a_training_client(client)
    adam = types.AdamParams(learning_rate=1e-2)

    def negative_log_likelihood(
        data: list[types.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        losses = [
            -(lp * torch.tensor(datum.loss_fn_inputs["weights"].data)).sum()
            for datum, lp in zip(data, logprobs, strict=True)
        ]
        return torch.stack(losses).sum(), {"answer:sum": 42.0}

    result = custom.forward_backward_custom(DATA, negative_log_likelihood).result()
    expected = built_in.forward_backward(DATA, "cross_entropy").result()
    norms = [norm_of(training.optim_step(adam).result()) for training in (custom, built_in)]

    assert loss_of(result) == pytest.approx(loss_of(expected), rel=1e-5)
    assert result.metrics["answer:sum"] == 42.0
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_top_k_targets_and_sparse_weights_are_a_distillation_loss(
    client: tinker.ServiceClient,
) -> None:
    training = a_training_client(client)
    targets = torch.tensor([[1, 2, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0], [4, 5, 6, 0, 0, 0]])
    weights = torch.tensor([[0.5, 0.5, 0, 0, 0, 0], [1.0, 0, 0, 0, 0, 0], [0.2, 0.3, 0.5, 0, 0, 0]])
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([7, 8, 9]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch_sparse(targets),
            "weights": types.TensorData.from_torch_sparse(weights),
        },
    )

    result = training.forward_backward([datum], "cross_entropy").result()

    assert datum.loss_fn_inputs["weights"].sparse_crow_indices is not None
    logprobs = result.loss_fn_outputs[0]["logprobs"]
    assert logprobs.shape == [3, 6]
    losses = -np.asarray(logprobs.data).reshape(3, 6) * weights.numpy()
    assert loss_of(result) == pytest.approx(losses.sum(), rel=1e-5)
    elementwise_loss = result.loss_fn_outputs[0]["elementwise_loss"]
    assert elementwise_loss.shape == [3, 6]
    np.testing.assert_allclose(elementwise_loss.data, losses.ravel(), rtol=1e-6)


def test_two_models_in_one_head_are_independent(
    server: Server, client: tinker.ServiceClient
) -> None:
    one, other = a_training_client(client), a_training_client(client, rank=8)
    alone = a_training_client(client)
    adam = types.AdamParams(learning_rate=1e-2)

    histories: dict[str, list[float]] = {"one": [], "alone": []}
    for _ in range(4):
        for name, training in (("one", one), ("alone", alone)):
            step = training.forward_backward(DATA, "cross_entropy")
            training.optim_step(adam).result()
            histories[name].append(loss_of(step.result()))
            if name == "one":
                other.forward_backward(DATA[:1], "cross_entropy").result()
                other.optim_step(types.AdamParams(learning_rate=0.1)).result()

    assert len(server.head_pids()) == 1
    assert histories["one"] == histories["alone"]


def test_rank_0_trains_all_weights_and_continues_from_a_checkpoint(
    client: tinker.ServiceClient,
) -> None:
    training = client.create_lora_training_client(MODEL, rank=0).result()
    before = loss_of(training.forward_backward(DATA, "cross_entropy").result())
    training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    after = loss_of(training.forward(DATA, "cross_entropy").result())
    path = training.save_state("whole").result().path
    resumed = client.create_training_client_from_state(path).result()

    assert (training.get_info().is_lora, training.get_info().lora_rank) == (False, None)
    assert after < before
    assert loss_of(resumed.forward(DATA, "cross_entropy").result()) == pytest.approx(after)
    assert resumed.get_info().is_lora is False


def test_rank_0_is_refused_if_layers_are_excluded(server: Server) -> None:
    session = server.post("create_session", {"sdk_version": "test"}).json()["session_id"]
    answer = server.post(
        "create_model",
        {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": MODEL,
            "lora_config": {"rank": 0, "train_mlp": False},
        },
    )

    assert answer.status == 400
    assert "remove train_mlp" in answer.detail


def test_a_full_fine_tuning_run_trains_all_weights(server: Server) -> None:
    session = server.post("create_session", {"sdk_version": "test"}).json()["session_id"]
    created = server.post(
        "create_model", {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
    ).json()

    result = server.result(str(created["request_id"])).json()
    info = server.post("get_info", {"model_id": result["model_id"]}).json()

    assert info["is_lora"] is False
    training = tinker.TrainingClient(
        server.client().holder,
        model_seq_id=0,
        model_id=str(result["model_id"]),
        info=types.GetInfoResponse.model_validate(info),
    )
    losses = []
    for _ in range(6):
        step = training.forward_backward(DATA, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        losses.append(loss_of(step.result()))
    assert losses[-1] < 0.8 * losses[0]
