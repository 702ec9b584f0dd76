"""Completions that repeat their prompt, as evaluations of likelihoods ask for them."""

from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from tinkercloud_protocol.wire import routes
from tinkercloud_testing.serving.served_heads import ServedHead, a_served_head
from tinkercloud_testing.small_models.models import byte_tokenizer, tiny_llama

SESSION = "s:sample:0"
PROMPTS = [list(b"The sky is blue"), list(b"Two")]
EVALUATION = {"max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234, "echo": True}
"""What lm-evaluation-harness sends for the likelihoods of continuations (local-completions)."""


async def completed(head: ServedHead, **fields: Any) -> dict[str, Any]:
    answer = await head.send(
        routes.OPENAI_COMPLETIONS, orjson.dumps({"model": "m", **fields}), SESSION
    )
    assert answer.status == 200, answer.body
    found: dict[str, Any] = orjson.loads(answer.body)
    return found


async def streamed(head: ServedHead, **fields: Any) -> list[dict[str, Any]]:
    body = orjson.dumps({"model": "m", "stream": True, **fields})
    answer = await head.send(routes.OPENAI_COMPLETIONS, body, SESSION)
    lines = [line for line in answer.body.split(b"\n\n") if line and b"[DONE]" not in line]
    return [orjson.loads(line.removeprefix(b"data: ")) for line in lines]


def likelihoods(answer: dict[str, Any], lengths: list[int]) -> list[tuple[float, bool]]:
    """Read the sum of logprobs of each continuation, and whether it is greedy, as lm-eval does."""
    found = []
    choices = sorted(answer["choices"], key=itemgetter("index"))
    for choice, length in zip(choices, lengths, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        greedy = all(
            logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True)
        )
        found.append((sum(logprobs), greedy))
    return found


def logprobs_of(tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = tiny_llama().eval()(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits, -1)


async def test_likelihoods_are_those_of_the_model_in_batches_too(tmp_path: Path) -> None:
    async with a_served_head(tmp_path) as head:
        await head.sampler(SESSION)
        answer = await completed(head, prompt=PROMPTS, **EVALUATION)
    lengths = [8, 1]
    found = likelihoods(answer, lengths)

    for prompt, length, (likelihood, is_greedy) in zip(PROMPTS, lengths, found, strict=True):
        rows = logprobs_of(prompt)[length - 1 : -1]
        expected = rows.gather(1, torch.tensor(prompt[length:])[:, None]).sum().item()
        assert likelihood == pytest.approx(expected, abs=1e-4)
        assert is_greedy == (rows.argmax(1).tolist() == prompt[length:])
    assert answer["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))


async def test_a_continuation_that_the_model_would_choose_is_greedy(tmp_path: Path) -> None:
    async with a_served_head(tmp_path) as head:
        await head.sampler(SESSION)
        chosen = (await head_tokens(head, PROMPTS[0]))[:6]
        prompt = [*PROMPTS[0], *chosen]
        answer = await completed(head, prompt=[prompt], **EVALUATION)

    assert likelihoods(answer, [len(PROMPTS[0])])[0][1]


async def head_tokens(head: ServedHead, prompt: list[int]) -> list[int]:
    body = {
        "sampling_session_id": SESSION,
        "seq_id": 0,
        "prompt": {"tokens": prompt},
        "sampling_params": {"max_tokens": 8, "temperature": 0, "stop": []},
    }
    request_id = (await head.send(routes.ASAMPLE, orjson.dumps(body), SESSION)).request_id
    result = orjson.loads((await head.result(request_id, "application/json")).body)
    tokens: list[int] = result["sequences"][0]["tokens"]
    return tokens


async def test_the_shape_is_that_of_legacy_completions(tmp_path: Path) -> None:
    async with a_served_head(tmp_path) as head:
        await head.sampler(SESSION)
        fields = {"prompt": "añb", "echo": True, "logprobs": 2, "max_tokens": 2, "seed": 1, "n": 2}
        answer = await completed(head, **fields)
        chunks = await streamed(head, **fields)
    names = ["a", "bytes:\\xc3", "bytes:\\xb1", "b"]
    texts = ["", ""]
    for chunk in chunks:
        for part in chunk["choices"]:
            texts[part["index"]] += part["text"]

    assert [choice["text"] for choice in answer["choices"]] == texts
    for index, choice in enumerate(answer["choices"]):
        logprobs = choice["logprobs"]
        assert choice["text"].startswith("añb")
        assert logprobs["tokens"][:4] == names
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert logprobs["text_offset"][:5] == [0, 1, 1, 2, 3]
        assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
        lists = [
            part["logprobs"]
            for chunk in chunks
            for part in chunk["choices"]
            if part["index"] == index and part["logprobs"]
        ]
        assert [each for part in lists for each in part["token_logprobs"]] == logprobs[
            "token_logprobs"
        ]


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_returns_the_prompt_alone(stream: bool, tmp_path: Path) -> None:
    async with a_served_head(tmp_path) as head:
        await head.sampler(SESSION)
        fields = {"prompt": ["one", "two"], "max_tokens": 0, "echo": True, "logprobs": 0}
        if stream:
            chunks = await streamed(head, **fields)
            parts = [part for chunk in chunks for part in chunk["choices"]]
        else:
            answer = await completed(head, **fields)
            parts = answer["choices"]
            assert answer["usage"]["completion_tokens"] == 0
        bare = await completed(head, prompt="one", max_tokens=0)

    assert [part["text"] for part in parts if part["text"]] == ["one", "two"]
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"] * 2
    [scored, _] = [part["logprobs"] for part in parts if part["logprobs"]]
    assert scored["tokens"] == ["o", "n", "e"]
    assert list(scored["top_logprobs"][2]) == ["e"]
    assert bare["choices"][0]["text"] == ""


async def test_the_token_that_ends_a_sample_is_listed_after_an_echoed_prompt(
    tmp_path: Path,
) -> None:
    async with a_served_head(tmp_path) as head:
        await head.sampler(SESSION)
        end = byte_tokenizer().eos_token_id
        bias = {str(end): 100}
        head.backend.text.turn_ends = frozenset({end})  # type: ignore[union-attr]
        answer = await completed(head, prompt="one", logit_bias=bias, **EVALUATION)

    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["o", "n", "e", "<|end|>"]
    assert answer["choices"][0]["text"] == "one"
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_an_echo_with_too_many_logprobs_is_refused(tmp_path: Path) -> None:
    async with a_served_head(tmp_path) as head:
        await head.sampler(SESSION)
        body = {"model": "m", "prompt": [[5] * 300] * 128, "echo": True, "logprobs": 20, "n": 8}
        answer = await head.send(routes.OPENAI_COMPLETIONS, orjson.dumps(body), SESSION)

    assert answer.status == 400
    assert orjson.loads(answer.body)["error"]["param"] == "prompt"


async def test_tokens_outside_the_vocabulary_are_refused_with_the_range(tmp_path: Path) -> None:
    async with a_served_head(tmp_path) as head:
        await head.sampler(SESSION)
        last = head.backend.trainer.limits.vocab_size - 1
        for token in (-1, last + 1, 1 << 31, 1 << 32):
            for echo in (False, True):
                for prompt in ([5, token], [[5], [token]]):
                    body = orjson.dumps({"model": "m", "prompt": prompt, "echo": echo})
                    answer = await head.send(routes.OPENAI_COMPLETIONS, body, SESSION)
                    error = orjson.loads(answer.body)["error"]

                    assert (answer.status, error["param"]) == (400, "prompt")
                    assert f"must be in 0..{last}" in error["message"]
                    assert str(token) in error["message"]


async def test_a_prompt_that_is_too_long_names_the_context_length(tmp_path: Path) -> None:
    async with a_served_head(tmp_path) as head:
        await head.sampler(SESSION)
        limit = head.backend.trainer.limits.max_context_length
        for prompt in ("x" * (limit + 1), [5] * (limit + 1), [[5], [5] * (limit + 1)]):
            body = orjson.dumps({"model": "m", "prompt": prompt})
            answer = await head.send(routes.OPENAI_COMPLETIONS, body, SESSION)
            error = orjson.loads(answer.body)["error"]

            assert answer.status == 400
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert f"{limit + 1} tokens exceed this model's maximum" in error["message"]


async def test_the_bytes_of_the_parts_of_a_character_are_listed(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    async with a_served_head(tmp_path, chat_template=template) as head:
        await head.sampler(SESSION)
        bias = {str(byte_tokenizer().encode("世")[0]): 100}
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
        asked = {**body, "logprobs": True, "top_logprobs": 2, "logit_bias": bias}
        answer = await head.send(routes.OPENAI_CHAT, orjson.dumps(asked), SESSION)

    entries = orjson.loads(answer.body)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[0xE4]] * 3
    assert all(len(top["bytes"]) == 1 for entry in entries for top in entry["top_logprobs"])
