"""Sampling as researchers use it: base models, snapshots, policy gradients."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from tinkercloud_testing.clients.raw_run import CONTEXT
from tinkercloud_testing.clients.sdk_steps import a_datum, a_text, score
from tinkercloud_testing.serving.servers import Server

MODEL = "tiny/llama"
PROMPT = types.ModelInput.from_ints([5, 6, 7])


def a_training_client(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()


def train(training: tinker.TrainingClient, steps: int, rate: float = 0.02) -> None:
    for _ in range(steps):
        passed = training.forward_backward([a_datum()], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=rate)).result()
        passed.result()


def test_a_base_model_can_be_sampled(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()

    result = sampler.sample(PROMPT, 3, types.SamplingParams(max_tokens=6, stop=[], seed=1)).result()

    assert [len(sequence.tokens) for sequence in result.sequences] == [6, 6, 6]
    assert len({sequence.sequence_id for sequence in result.sequences}) == 3
    assert {sequence.stop_reason for sequence in result.sequences} == {"length"}
    assert [len(sequence.logprobs or []) for sequence in result.sequences] == [6, 6, 6]


def test_samples_with_stability_information_have_the_same_tokens(
    client: tinker.ServiceClient,
) -> None:
    params = types.SamplingParams(max_tokens=6, stop=[], seed=1)
    plain, recorded = (
        client.create_sampling_client(base_model=MODEL, record_stability_info=wanted).result()
        for wanted in (False, True)
    )

    (first,), (second,) = (
        sampler.sample(PROMPT, 1, params).result().sequences for sampler in (plain, recorded)
    )

    assert second.tokens == first.tokens
    assert second.sequence_id


def test_sampled_logprobs_equal_those_of_the_trainer(client: tinker.ServiceClient) -> None:
    training = a_training_client(client)
    train(training, steps=2)
    sampler = training.save_weights_and_get_sampling_client().result()

    params = types.SamplingParams(max_tokens=10, temperature=0.7, stop=[])
    sequence = sampler.sample(PROMPT, 1, params).result().sequences[0]
    scored = score(training, [*PROMPT.to_ints(), *sequence.tokens])

    assert sequence.logprobs is not None
    np.testing.assert_allclose(scored[2:], sequence.logprobs, atol=1e-5)


def test_a_policy_gradient_loop_starts_on_policy(client: tinker.ServiceClient) -> None:
    training = a_training_client(client)
    sampler = training.save_weights_and_get_sampling_client().result()
    result = sampler.sample(PROMPT, 4, types.SamplingParams(max_tokens=5, stop=[], seed=3)).result()

    data = []
    for sequence, advantage in zip(result.sequences, [1.0, -1.0, 0.5, -0.5], strict=True):
        tokens = [*PROMPT.to_ints(), *sequence.tokens]
        pad = [0.0] * (PROMPT.length - 1)
        assert sequence.logprobs is not None
        logprobs = [*pad, *sequence.logprobs]
        advantages = [*pad, *[advantage] * len(sequence.tokens)]
        data.append(a_text(tokens, logprobs=logprobs, advantages=advantages))
    output = training.forward_backward(data, "importance_sampling").result()
    applied = training.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    # Every ratio is one, so the loss is the negative sum of the advantages, which is zero here.
    assert output.metrics["loss:sum"] == pytest.approx(0.0, abs=1e-4)
    assert applied.metrics is not None
    assert applied.metrics["grad_norm"] > 0
    assert output.metrics["ppo_kl:mean"] == pytest.approx(0.0, abs=1e-4)
    # The policy has moved away from the one that sampled.
    trained = training.forward(data, "ppo").result()
    gaps = [
        np.mean(
            np.array(datum.loss_fn_inputs["logprobs"].data[-5:]) - logprobs["logprobs"].data[-5:]
        )
        for datum, logprobs in zip(data, trained.loss_fn_outputs, strict=True)
    ]
    assert trained.metrics["ppo_kl:mean"] == pytest.approx(np.mean(gaps), abs=1e-6)
    assert trained.metrics["ppo_kl:mean"] != 0


def test_an_older_snapshot_keeps_its_weights_while_training_continues(
    client: tinker.ServiceClient,
) -> None:
    training = a_training_client(client)
    params = types.SamplingParams(max_tokens=1, stop=[], temperature=0)

    before = training.save_weights_and_get_sampling_client().result()
    first = before.compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8])).result()
    train(training, steps=4)
    after = training.save_weights_and_get_sampling_client().result()
    again = before.compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8])).result()
    second = after.compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8])).result()

    assert first == again
    assert first[3] is not None
    assert second[3] is not None
    assert abs(second[3] - first[3]) > 0.1
    assert after.sample(PROMPT, 1, params).result().sequences[0].tokens == [8]


def test_inflight_samplers_share_the_latest_weights(client: tinker.ServiceClient) -> None:
    training = a_training_client(client)
    text = types.ModelInput.from_ints([5, 6, 7, 8])

    old = training.save_weights_and_get_sampling_client(kind="inflight").result()
    before = old.compute_logprobs(text).result()
    train(training, steps=4)
    new = training.save_weights_and_get_sampling_client(kind="inflight").result()

    assert old.compute_logprobs(text).result() == new.compute_logprobs(text).result()
    assert new.compute_logprobs(text).result() != before


def test_prompt_logprobs_and_top_logprobs_are_returned_together(
    client: tinker.ServiceClient,
) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    prompt = types.ModelInput.from_ints([5, 6, 7, 8, 9])

    result = sampler.sample(
        prompt,
        1,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData(data=[-1, -1, 8, 9], dtype="int64", shape=[4, 1]),
        prompt_alt_tokens_k=2,
        prompt_logprobs_last_n=3,
    ).result()

    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[:2] == [None, None]
    scored = [value for value in result.prompt_logprobs[2:] if value is not None]
    assert len(scored) == 3
    assert max(scored) < 0
    assert result.target_prompt_logprobs is not None
    targets = result.target_prompt_logprobs.to_numpy()[:, 0]
    assert list(targets[:2]) == [0.0, 0.0]
    np.testing.assert_allclose(targets[2:], scored[1:], atol=1e-6)
    assert result.prompt_alt_tokens is not None
    assert result.prompt_alt_tokens.tokens.shape == [4, 2]
    assert result.topk_prompt_logprobs is not None
    assert result.sequences[0].topk_logprobs is not None


def test_prompt_logprobs_are_returned_with_the_most_likely_tokens(
    client: tinker.ServiceClient,
) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    prompt, params = types.ModelInput.from_ints([5, 6, 7, 8]), types.SamplingParams(max_tokens=1)

    result = sampler.sample(prompt, 1, params, topk_prompt_logprobs=2).result()

    assert result.topk_prompt_logprobs is not None
    expected = sampler.compute_logprobs(prompt).result()
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-40, 1e-37, 1e-6])
def test_very_low_temperatures_select_the_most_likely_token(
    client: tinker.ServiceClient, temperature: float
) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    sampled = [
        sampler.sample(
            prompt, 1, types.SamplingParams(max_tokens=6, stop=[], temperature=each, seed=1)
        )
        for each in (temperature, 0.0)
    ]

    low, greedy = [each.result().sequences[0].tokens for each in sampled]

    assert low == greedy


def test_a_sequence_sampled_up_to_the_context_length_can_be_scored(
    client: tinker.ServiceClient,
) -> None:
    training = a_training_client(client)
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([7 * position % 250 for position in range(CONTEXT - 9)])

    free = types.SamplingParams(stop=[], seed=1)
    sequence = sampler.sample(prompt, 1, free).result().sequences[0]
    rollout = [*prompt.to_ints(), *sequence.tokens]
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(rollout)).result()
    one_more = sampler.sample(types.ModelInput.from_ints(rollout), 1, free).result().sequences[0]

    assert len(rollout) == CONTEXT
    expected = score(training, [*rollout, *one_more.tokens])
    assert [*scored[1:], *(one_more.logprobs or [])] == pytest.approx(expected, abs=1e-5)
    assert sequence.logprobs == pytest.approx(expected[-10:-1], abs=1e-5)


def test_stop_strings_end_a_sequence(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    tokenizer = client.create_lora_training_client(MODEL, rank=4).result().get_tokenizer()
    params = types.SamplingParams(max_tokens=30, stop=[], seed=5)
    free = sampler.sample(PROMPT, 1, params).result().sequences[0]
    text = str(tokenizer.decode(free.tokens[:12]))[-3:]

    stopped = types.SamplingParams(max_tokens=30, stop=[text], seed=5)
    sequence = sampler.sample(PROMPT, 1, stopped).result().sequences[0]

    assert sequence.stop_reason == "stop"
    assert str(tokenizer.decode(sequence.tokens)).endswith(text)
    assert list(sequence.tokens) == list(free.tokens[: len(sequence.tokens)])


def test_a_pickled_sampling_client_samples_the_same_weights(
    client: tinker.ServiceClient,
) -> None:
    training = a_training_client(client)
    train(training, steps=2)
    sampler = training.save_weights_and_get_sampling_client().result()
    text = types.ModelInput.from_ints([5, 6, 7, 8])

    clone = pickle.loads(pickle.dumps(sampler))  # noqa: S301 - our own

    assert clone.compute_logprobs(text).result() == sampler.compute_logprobs(text).result()


def test_many_concurrent_sampling_requests_complete(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()

    futures = [
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=4, stop=[], seed=seed))
        for seed in range(100)
    ]
    tokens = {tuple(future.result().sequences[0].tokens) for future in futures}

    assert len(tokens) > 50


def test_a_tokenizer_is_loaded_through_the_mirror_only(server: Server, tmp_path: Path) -> None:
    script = (
        "from transformers import AutoTokenizer;"
        f"print(AutoTokenizer.from_pretrained({MODEL!r}).encode('Hi'))"
    )
    environment = {"HF_ENDPOINT": f"{server.url}/hf", "HF_HOME": str(tmp_path), "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )

    assert result.stdout.startswith("["), result.stderr
    assert server.request("GET", f"/hf/{MODEL}/resolve/main/model.safetensors").status == 404
