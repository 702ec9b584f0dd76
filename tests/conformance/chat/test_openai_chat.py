"""The official openai package talks to a served model and to its checkpoints."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import tinker
from tinker import types
from transformers import AutoTokenizer

from tinkercloud_testing.serving.servers import API_KEY, Server
from tinkercloud_testing.small_models.chat import CHAT_MODEL

QUESTION: Any = [{"role": "user", "content": "What is 2 + 2?"}]
PROMPT = "user: What is 2 + 2?\nassistant: "


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    wanted = {"model": CHAT_MODEL, "messages": QUESTION, "max_completion_tokens": 24, "seed": 5}
    return client.chat.completions.create(**{**wanted, **fields})


def sampled_by_the_sdk(sdk: tinker.ServiceClient, server: Server, num_samples: int = 1) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(server.models[CHAT_MODEL])
    prompt = types.ModelInput.from_ints(tokenizer.encode(PROMPT))
    params = types.SamplingParams(max_tokens=24, seed=5)
    sampler = sdk.create_sampling_client(base_model=CHAT_MODEL).result()
    return sampler.sample(prompt, num_samples, params).result()


@pytest.fixture
def stranger(chat_server: Server) -> Iterator[openai.OpenAI]:
    """Return a client of another owner."""
    key = chat_server.command("keys", "create", "stranger", "--owner", "stranger").strip()
    url = f"{chat_server.url}/oai/api/v1"
    with openai.OpenAI(base_url=url, api_key=key.split()[-1], max_retries=0) as client:
        yield client


def a_checkpoint(sdk: tinker.ServiceClient) -> str:
    training = sdk.create_lora_training_client(base_model=CHAT_MODEL, rank=4).result()
    return str(training.save_weights_for_sampler("for-chat").result().path)


def test_a_chat_completion_has_the_logprobs_of_the_same_sample_by_the_sdk(
    openai_client: openai.OpenAI, sdk: tinker.ServiceClient, chat_server: Server
) -> None:
    answer = ask(openai_client, n=2, logprobs=True, top_logprobs=3)
    expected = sampled_by_the_sdk(sdk, chat_server, 2)

    for choice, sequence in zip(answer.choices, expected.sequences, strict=True):
        entries = choice.logprobs.content
        ended = sequence.stop_reason == "stop"
        wanted = sequence.logprobs[:-1] if ended else sequence.logprobs
        assert [entry.logprob for entry in entries] == pytest.approx(wanted, abs=1e-5)
        assert all(len(entry.top_logprobs) == 3 for entry in entries)
        assert choice.finish_reason == sequence.stop_reason
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == sum(len(s.tokens) for s in expected.sequences)


def test_streamed_text_equals_whole_text(openai_client: openai.OpenAI) -> None:
    fields = {"n": 2, "logprobs": True, "temperature": 0.8, "top_p": 0.9}
    whole = ask(openai_client, **fields)
    chunks = list(ask(openai_client, stream=True, stream_options={"include_usage": True}, **fields))

    for index, choice in enumerate(whole.choices):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        entries = [entry for c in mine if c.logprobs for entry in c.logprobs.content]
        expected = [entry.logprob for entry in choice.logprobs.content]
        # The second prompt is read from the cache, so its numbers may be rounded differently.
        assert [entry.logprob for entry in entries] == pytest.approx(expected, abs=1e-5)
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].choices == []


def test_tokens_are_streamed_while_the_rest_is_sampled(
    openai_client: openai.OpenAI, chat_server: Server
) -> None:
    stream = ask(openai_client, stream=True, max_completion_tokens=450, logit_bias={})
    first = next(chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
    stream.close()

    assert first.choices[0].finish_reason is None
    # The samples were cancelled with the connection: another request gets its turn and its end.
    assert ask(openai_client, max_completion_tokens=2).usage.completion_tokens <= 2


def test_text_ends_before_a_stop_string(openai_client: openai.OpenAI) -> None:
    text = ask(openai_client, temperature=0).choices[0].message.content
    stop = text[4:6]

    whole = ask(openai_client, temperature=0, stop=[stop]).choices[0]
    chunks = ask(openai_client, temperature=0, stop=[stop], stream=True)
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    assert whole.message.content == streamed == text[: text.index(stop)]
    assert whole.finish_reason == "stop"


def test_a_checkpoint_is_a_model_under_its_path(
    openai_client: openai.OpenAI, sdk: tinker.ServiceClient
) -> None:
    path = a_checkpoint(sdk)

    plain = ask(openai_client, model=path)
    with_base = ask(openai_client, model=f"{CHAT_MODEL};{path}")
    listed = {model.id for model in openai_client.models.list()}

    assert plain.model == path
    assert plain.choices[0].message.content == with_base.choices[0].message.content
    assert {CHAT_MODEL, path} <= listed
    assert openai_client.models.retrieve(CHAT_MODEL).id == CHAT_MODEL


def test_a_missing_adapter_is_not_found_and_never_the_base(
    openai_client: openai.OpenAI, sdk: tinker.ServiceClient
) -> None:
    path = a_checkpoint(sdk).rpartition("/")[0] + "/missing"

    for name in (path, f"{CHAT_MODEL};{path}", "tiny/unknown", f"tiny/unknown;{path}"):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(openai_client, model=name)
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["type"] == "invalid_request_error"


def test_a_path_of_another_owner_is_not_found(
    stranger: openai.OpenAI, sdk: tinker.ServiceClient
) -> None:
    path = a_checkpoint(sdk)

    with pytest.raises(openai.NotFoundError):
        ask(stranger, model=path)
    with pytest.raises(openai.NotFoundError):
        ask(stranger, model=path.split("/")[2])
    assert path not in {model.id for model in stranger.models.list()}


def test_a_model_in_training_answers_with_its_current_weights_while_it_trains(
    openai_client: openai.OpenAI, sdk: tinker.ServiceClient
) -> None:
    training = sdk.create_lora_training_client(base_model=CHAT_MODEL, rank=4).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3]),
            "weights": types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32", shape=[3]),
        },
    )
    run_id = training.get_info().model_id
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.extend(ask(openai_client, model=run_id) for _ in range(3))
    )
    thread.start()
    for _ in range(3):
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    thread.join()

    assert [answer.model for answer in answers] == [run_id] * 3
    assert all(answer.usage.completion_tokens > 0 for answer in answers)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"logit_bias": {"1000000": 3}}, "logit_bias"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"extra_body": {"guided_regex": ".*"}}, "guided_regex"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    openai_client: openai.OpenAI, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client, **fields)
    assert caught.value.param == name
    assert name in caught.value.message


def test_a_picture_is_refused(openai_client: openai.OpenAI) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(openai.BadRequestError, match="image_url"):
        ask(openai_client, messages=[{"role": "user", "content": [part]}])


def test_a_wrong_key_is_an_authentication_error(chat_server: Server) -> None:
    url = f"{chat_server.url}/oai/api/v1"
    with (
        openai.OpenAI(base_url=url, api_key="tml-wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        ask(client)
    assert caught.value.code == "invalid_api_key"


def test_completions_of_several_prompts(openai_client: openai.OpenAI) -> None:
    fields: Any = {"model": CHAT_MODEL, "max_tokens": 8, "seed": 3, "n": 2, "logprobs": 2}
    prompts: Any = ["one", "another"]

    both = openai_client.completions.create(prompt=prompts, **fields)
    alone = openai_client.completions.create(prompt=list(b"another"), **fields)
    stream = openai_client.completions.create(prompt=prompts, stream=True, **fields)
    texts = ["", "", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text

    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices] == texts
    assert both.choices[0].logprobs is not None
    assert len(both.choices[0].logprobs.tokens or []) == 8
    assert alone.usage is not None
    assert alone.usage.prompt_tokens == 7


@pytest.mark.parametrize(
    "body", [b"", b"[", b"[]", b"{}", b'{"model":5}', b'{"model":"' + b"x" * 2000]
)
@pytest.mark.parametrize("path", ["chat/completions", "completions", "unknown", "models"])
def test_a_malformed_body_is_a_client_error(chat_server: Server, path: str, body: bytes) -> None:
    url = f"{chat_server.url}/oai/api/v1/{path}"
    response = httpx.post(url, content=body, headers={"X-API-Key": API_KEY})

    assert 400 <= response.status_code < 500
    assert response.json()["error"]["message"]
