"""Samples with a grammar: in the torch sampler, in company, and in requests to other samplers."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.models import (
    EOS_TOKEN_ID,
    byte_tokenizer,
    tiny_deepseek_v3,
    tiny_llama,
)
from tinkercloud_testing.training.engines import a_sampling_request, an_engine, publish_adapter
from tinkercloud_worker.chat.grammar.grammars import Grammar, Grammars
from tinkercloud_worker.chat.rules.answer_rules import AnswerRule, Function, ToolChoice, rule_of
from tinkercloud_worker.chat.text import ChatText
from tinkercloud_worker.engine.sampling.sampler_interface import (
    LogitChanges,
    SamplingRequest,
    StopRules,
)
from tinkercloud_worker.inference.client import InferenceClient, Json
from tinkercloud_worker.inference.sglang.sglang_dialect import SglangDialect
from tinkercloud_worker.inference.vllm import VllmDialect
from tinkercloud_worker.torch_sampler.decode.decoding import RunningSequence, allowed_logits

# New grammars are tried in processes of their own.
pytestmark = pytest.mark.timeout(180)
PROMPT = [7, 9, 7, 30, 2]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["red", "green"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["kind", "list"],
    "additionalProperties": False,
}
TEXT = ChatText(byte_tokenizer())


def a_grammar(
    schema: dict[str, Any] | None = None, ends: Sequence[int] = (EOS_TOKEN_ID,)
) -> Grammar:
    rule = AnswerRule(json_schema=SCHEMA if schema is None else schema)
    return Grammars().compile(rule, TEXT, ends, PROMPT)


def a_request(grammar: Grammar | None, seed: int = 1, **fields: Any) -> SamplingRequest:
    changes = fields.pop("changes", None)
    fields = {"max_tokens": 400, "top_logprobs": 2, **fields}
    request = a_sampling_request(PROMPT, seed=seed, **fields)
    request = replace(request, grammar=grammar)
    return request if changes is None else replace(request, changes=changes)


def text_of(tokens: Sequence[int]) -> str:
    return TEXT.decode([token for token in tokens if token != EOS_TOKEN_ID])


def conforms(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"kind", "list"} and found["kind"] in ("red", "green")


@pytest.mark.parametrize("model", [tiny_llama, tiny_deepseek_v3])
async def test_samples_of_one_batch_each_have_their_form_and_the_models_logprobs(
    model: Any, tmp_path: Path
) -> None:
    reference = model().eval()
    grammar = a_grammar()
    with an_engine(model(), tmp_path) as engine:
        await engine.sampler.publish("base", None)
        requests = [
            a_request(grammar, num_samples=2),
            a_request(grammar, temperature=0.0),
            a_request(grammar, top_k=3, top_p=0.5, seed=2),
            a_request(grammar, changes=LogitChanges(2.0, bias=((10, -100.0),)), seed=3),
        ]
        results = await asyncio.gather(*[engine.sampler.sample("base", r) for r in requests])

    for sequence in [each for result in results for each in result.sequences]:
        assert sequence.stopped
        assert sequence.tokens[-1] == EOS_TOKEN_ID
        assert conforms(text_of(sequence.tokens))
        with torch.no_grad():
            tokens = torch.tensor([[*PROMPT, *sequence.tokens]])
            logits = reference(tokens).logits[0, len(PROMPT) - 1 : -1]
        own = torch.log_softmax(logits, 1)
        expected = own.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, atol=2e-5, rtol=0)
        assert sequence.top is not None
        torch.testing.assert_close(
            torch.from_numpy(sequence.top.logprobs), own.topk(2, 1).values, atol=2e-5, rtol=0
        )


async def test_samples_without_a_grammar_are_the_same_to_the_bit_in_such_company(
    tmp_path: Path,
) -> None:
    grammar = a_grammar()
    with an_engine(tiny_llama(), tmp_path) as engine:
        await engine.sampler.publish("base", None)
        await publish_adapter(engine, "adapter", seed=3)

        async def sampled(company: Grammar | None) -> list[Any]:
            requests = [a_request(None, seed=each, max_tokens=20) for each in range(4)]
            others = [a_request(company, seed=9 + each, max_tokens=20) for each in range(3)]
            results = await asyncio.gather(
                *[engine.sampler.sample("base", each) for each in requests],
                *[engine.sampler.sample("adapter", each) for each in others],
            )
            return [result.sequences[0] for result in results[: len(requests)]]

        await sampled(None)  # From here on, prompts are read from the cache.
        alone, with_grammars = await sampled(None), await sampled(grammar)

    for before, after in zip(alone, with_grammars, strict=True):
        assert before.tokens == after.tokens
        assert before.logprobs == after.logprobs


async def test_a_model_that_has_no_end_tokens_stops_where_the_form_is_complete(
    tmp_path: Path,
) -> None:
    grammar = a_grammar(ends=())
    with an_engine(tiny_llama(), tmp_path) as engine:
        await engine.sampler.publish("base", None)
        request = a_request(grammar, stop=StopRules(frozenset(), ()))
        (sequence,) = (await engine.sampler.sample("base", request)).sequences

    assert sequence.stopped
    assert conforms(text_of(sequence.tokens))


async def test_a_grammar_that_becomes_too_complex_fails_its_own_request(tmp_path: Path) -> None:
    class Failing:
        """A grammar whose limits are reached at the third token."""

        source, is_needed, is_complete = "", True, False

        def matcher(self) -> "Failing":
            self.left = 3
            return self

        def allowed(self, ends: object) -> Any:
            return np.ones(50, np.bool_)

        def add(self, token: int) -> None:
            self.left -= 1
            if not self.left:
                raise InvalidRequest("response_format: too complex")

    reported: list[int] = []
    with an_engine(tiny_llama(), tmp_path) as engine:
        await engine.sampler.publish("base", None)
        failing: Any = a_request(None)
        failing = replace(
            failing, grammar=Failing(), on_token=lambda each: reported.append(each.token)
        )
        good = a_request(a_grammar())
        results = await asyncio.gather(
            engine.sampler.sample("base", failing),
            engine.sampler.sample("base", good),
            return_exceptions=True,
        )

    assert isinstance(results[0], InvalidRequest)
    assert len(reported) == 2
    assert not isinstance(results[1], BaseException)
    assert conforms(text_of(results[1].sequences[0].tokens))


def test_hidden_tokens_are_never_part_of_the_form_and_marks_count_as_their_text() -> None:
    tokenizer = byte_tokenizer()
    added = ("<tool_call>", "</tool_call>", "<|im_start|>")
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in added])
    text = ChatText(tokenizer)
    ids = tokenizer.convert_tokens_to_ids
    string = AnswerRule(json_schema={"type": "string"})
    matcher = Grammars().compile(string, text, [EOS_TOKEN_ID], PROMPT).matcher()
    matcher.add(tokenizer.encode('"')[0])
    allowed = matcher.allowed([EOS_TOKEN_ID])
    assert allowed[ids("<tool_call>")]
    assert not allowed[[ids("<|im_start|>"), EOS_TOKEN_ID]].any()

    call = AnswerRule(functions=[Function("f", {"const": {}}, "tools")], is_one_call=True)
    matcher = Grammars().compile(call, text, [EOS_TOKEN_ID], PROMPT).matcher()
    tokens = tokenizer.encode('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert tokens[0] == ids("<tool_call>")
    for token in tokens:
        assert matcher.allowed([EOS_TOKEN_ID])[token]
        matcher.add(token)
    assert matcher.is_complete


def test_a_grammar_is_compiled_once_for_requests_that_repeat_it() -> None:
    grammars, rule = Grammars(), AnswerRule(json_schema=SCHEMA)

    first = grammars.compile(rule, TEXT, [EOS_TOKEN_ID], PROMPT)

    assert grammars.compile(rule, TEXT, [EOS_TOKEN_ID], [3]) is first


def test_the_refusal_of_a_schema_names_the_field_of_each_request() -> None:
    grammars, impossible = Grammars(), {"type": "string", "pattern": "(?=a)b"}

    for field in ("response_format", "output_config", "response_format"):
        rule = AnswerRule(json_schema=impossible, json_field=field)
        with pytest.raises(InvalidRequest, match=f"^{field}: "):
            grammars.compile(rule, TEXT, [EOS_TOKEN_ID], PROMPT)


@pytest.mark.parametrize("schema", [{"enum": []}, {"type": []}, {"anyOf": []}], ids=str)
def test_an_empty_keyword_of_a_schema_is_named_as_the_schema_has_it(
    schema: dict[str, list[str]],
) -> None:
    [keyword] = schema

    with pytest.raises(InvalidRequest, match=f"Unsatisfiable schema: {keyword} is empty"):
        a_grammar({"type": "object", "properties": {"a": schema}, "anyOf": [schema]})


class Answering(InferenceClient):
    """A SGLang server with one answer, in the shape of its source."""

    def __init__(self) -> None:
        super().__init__("http://sglang", key=None, max_concurrent=1)
        self.sent: list[Json] = []

    async def generate(self, path: str, body: Json) -> Json:
        self.sent.append(body)
        meta: dict[str, Any] = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-9.0, 5, None]],
        }
        prompt = len(body["input_ids"][0])
        scored = [[None, 0, None], [-1.5, 5, None]]
        meta |= {"input_token_logprobs": scored, "prompt_tokens": prompt}
        return {"items": [{"meta_info": meta}]}


async def test_sglang_receives_the_grammar_and_scores_the_sample_without_it() -> None:
    client, grammar = Answering(), a_grammar()
    request = replace(a_request(grammar), top_logprobs=0)

    result = await SglangDialect(client).sample(request, None)

    sampling, scoring = client.sent
    assert sampling["sampling_params"][0]["ebnf"] == grammar.source
    assert "ebnf" not in scoring["sampling_params"][0]
    assert list(result.sequences[0].logprobs) == [-1.5]


class Completing(InferenceClient):
    """A vLLM server that notes what it is asked."""

    def __init__(self) -> None:
        super().__init__("http://vllm", key=None, max_concurrent=1)
        self.sent: list[Json] = []

    async def generate(self, path: str, body: Json) -> Json:
        self.sent.append(body)
        raise ConnectionError


async def test_vllm_is_not_asked_for_a_form() -> None:
    with pytest.raises(InvalidRequest, match=r"^response_format, tool_choice.* is vLLM"):
        await VllmDialect(Completing(), "tiny").sample(a_request(a_grammar()), None)


async def test_vllm_is_asked_for_any_text_where_agents_only_prefer_strict_calls() -> None:
    strict = Function("f", {"type": "object"}, "tools.0", is_strict=True)
    rule = rule_of([strict], ToolChoice("auto"))
    assert rule is not None
    grammar, client = Grammars().compile(rule, TEXT, [EOS_TOKEN_ID], PROMPT), Completing()

    with pytest.raises(ConnectionError):
        await VllmDialect(client, "tiny").sample(a_request(grammar), None)

    assert len(client.sent) == 1


@pytest.mark.parametrize("num_tokens", [30, 50, 80])
def test_a_tokenizer_may_have_fewer_or_more_tokens_than_the_model_has_logits(
    num_tokens: int,
) -> None:
    class Allowing:
        """A grammar that allows its last token, or the last one with a logit."""

        source, is_needed, is_complete = "", True, False

        def matcher(self) -> "Allowing":
            return self

        def allowed(self, ends: object) -> Any:
            del ends
            return np.arange(num_tokens) == min(num_tokens, 50) - 1

        def add(self, token: int) -> None:
            del token

    logits, grammar = torch.zeros(1, 50), Allowing()
    grammatical = replace(a_request(None), grammar=grammar)

    masked = allowed_logits(logits, [RunningSequence(grammatical, 0, None)])

    assert masked.isfinite().nonzero().tolist() == [[0, min(num_tokens, 50) - 1]]
