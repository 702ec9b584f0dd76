"""Large and many chat requests of one owner leave threads and memory to others."""

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.served_heads import TOKEN, Answer, ServedHead, a_served_head
from tinkercloud_testing.small_models.models import byte_tokenizer
from tinkercloud_worker.chat.text import ChatText
from tinkercloud_worker.head.serve.prompt_work import PromptWork
from tinkercloud_worker.head.wire.head_http import Request

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
LONG = "one two " * 900_000
HERS, HIS = "a:sample:0", "b:sample:0"


def a_chat(content: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content}]
    body = {"model": "m", "messages": messages, "max_tokens": 2, **fields}
    return orjson.dumps({name: value for name, value in body.items() if value is not None})


def error_of(answer: Answer) -> Mapping[str, Any]:
    found: Mapping[str, Any] = orjson.loads(answer.body)["error"]
    return found


def is_started() -> bool:
    return any("prompts" in thread.name for thread in threading.enumerate())


async def owners(head: ServedHead) -> None:
    await head.sampler(HERS, "her")
    await head.sampler(HIS, "his")


async def a_path(head: ServedHead, session: str, is_recorded: bool) -> str:
    """Return the path of chats with a model: that of the model, or of a recorded session of it."""
    if not is_recorded:
        return routes.OPENAI_CHAT
    made = await head.send(routes.OPENAI_SESSIONS, orjson.dumps({"model": "m"}), session)
    return f"{routes.OPENAI_SESSIONS}/{orjson.loads(made.body)['id']}/v1/chat/completions"


async def test_six_prompts_of_seven_megabytes_are_refused_without_keeping_their_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_served_head(tmp_path, chat_template=TEMPLATE) as head:
        await owners(head)
        text = head.backend.text
        assert text is not None
        encoded: list[int] = []
        tokenizer = text._tokenizer
        encode = tokenizer.encode

        def watched(text: str, **options: Any) -> Any:
            encoded.append(len(text))
            return encode(text, **options)

        monkeypatch.setattr(tokenizer, "encode", watched)
        flood = [
            asyncio.create_task(head.send(path, a_chat(LONG), HERS))
            for path in (routes.OPENAI_CHAT, routes.ANTHROPIC_MESSAGES) * 3
        ]
        short = await head.send(routes.OPENAI_CHAT, a_chat("hi"), HIS)
        refused = await asyncio.gather(*flood)

    assert short.status == 200
    assert {answer.status for answer in refused} == {400}
    openai, anthropic = error_of(refused[0]), error_of(refused[1])
    assert (openai["code"], openai["param"]) == ("context_length_exceeded", "messages")
    assert "maximum context length" in openai["message"]
    assert anthropic["message"].startswith("prompt is too long: at least ")
    assert max(encoded) <= 1 << 16
    assert sum(encoded) < 20 << 16


async def test_an_owner_is_answered_while_all_requests_of_another_owner_are_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proceed, render = threading.Event(), ChatText.render

    def held(self: ChatText, messages: Any, *args: Any, **kwargs: Any) -> list[int]:
        if messages[0]["content"] == "slow":
            proceed.wait()
        return render(self, messages, *args, **kwargs)

    monkeypatch.setattr(ChatText, "render", held)
    count = routes.ANTHROPIC_COUNT_TOKENS
    async with a_served_head(tmp_path, chat_template=TEMPLATE) as head:
        await owners(head)
        flood = [
            asyncio.create_task(head.send(path, a_chat("slow", max_tokens=most), HERS))
            for path, most in [(routes.OPENAI_CHAT, 2), (count, None)] * 20
        ]
        await asyncio.sleep(0)
        chat = await head.send(routes.OPENAI_CHAT, a_chat("hi"), HIS)
        counted = await head.send(count, a_chat("hi", max_tokens=None), HIS)
        proceed.set()
        answered = await asyncio.gather(*flood)

    assert (chat.status, orjson.loads(counted.body)) == (200, {"input_tokens": 2})
    assert {answer.status for answer in answered} == {200}


async def test_bodies_of_one_owner_take_turns_for_its_room_and_others_have_their_own() -> None:
    work, entered = PromptWork(), asyncio.Event()

    async def second() -> None:
        async with work.room("her", 1):
            entered.set()

    async with work.room("her", routes.MAX_CHAT_BODY_BYTES):
        waiting = asyncio.create_task(second())
        async with work.room("his", routes.MAX_CHAT_BODY_BYTES):
            await asyncio.sleep(0)
            assert not entered.is_set()
    await waiting


@pytest.mark.parametrize("is_recorded", [False, True], ids=["chat", "turns of recorded sessions"])
async def test_a_flood_of_large_bodies_is_not_received_at_once_and_leaves_room_to_another_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    proceed, render = threading.Event(), ChatText.render
    received: list[str] = []

    def held(self: ChatText, messages: Any, *args: Any, **kwargs: Any) -> list[int]:
        if messages[0]["content"] == "slow":
            proceed.wait()
        return render(self, messages, *args, **kwargs)

    async def watched(self: Request, receive: Any = Request.body) -> bytes:
        received.append(self.headers[routes.TARGET_HEADER])
        return bytes(await receive(self))

    monkeypatch.setattr(ChatText, "render", held)
    monkeypatch.setattr(Request, "body", watched)
    large = a_chat("slow", user="x" * (routes.MAX_CHAT_BODY_BYTES * 2 // 5))
    async with a_served_head(tmp_path, chat_template=TEMPLATE) as head:
        await owners(head)
        paths = {session: await a_path(head, session, is_recorded) for session in (HERS, HIS)}
        received.clear()
        flood = [asyncio.create_task(head.send(paths[HERS], large, HERS)) for _ in range(5)]
        await asyncio.to_thread(wait_until, lambda: len(received) >= 2, "two of her bodies")
        small = await head.send(paths[HIS], a_chat("hi"), HIS)
        in_time = list(received)
        proceed.set()
        answered = await asyncio.gather(*flood)

    assert small.status == 200
    assert in_time == [HERS, HERS, HIS]
    assert [answer.status for answer in answered] == [200] * 5


async def test_a_template_stops_when_its_client_has_gone(tmp_path: Path) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if messages[0].content == 'hi' %}hi{% else %}" + endless + "{% endif %}"
    async with a_served_head(tmp_path, chat_template=template) as head:
        await owners(head)
        headers = {routes.HEAD_TOKEN_HEADER: TOKEN, routes.TARGET_HEADER: HERS}
        async with aiohttp.ClientSession() as client:
            url = head.url + routes.OPENAI_CHAT
            gone = asyncio.create_task(client.post(url, data=a_chat("go"), headers=headers))
            await asyncio.to_thread(wait_until, is_started, "a job in a thread")
            gone.cancel()
        # The owner has one job at a time, so this one waits until the other has stopped.
        after = await head.send(routes.OPENAI_CHAT, a_chat("hi"), HERS)

    assert after.status == 200


async def test_a_job_with_too_many_steps_fails() -> None:
    work = PromptWork(max_steps=1000)

    with pytest.raises(InvalidRequest, match="too many steps"):
        await work.run("me", lambda: [chr(number) for number in range(1000)])
    assert await work.run("me", lambda: 5) == 5


async def test_a_template_with_too_many_steps_is_not_said_to_reject_the_conversation() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for i in range(999) %}{{ i | string }}{% endfor %}"
    text, work = ChatText(tokenizer), PromptWork(max_steps=100)

    with pytest.raises(InvalidRequest, match=r"^the request body: takes too many steps"):
        await work.run("me", lambda: text.render([{"role": "user", "content": "hi"}], [], {}))


async def test_a_job_whose_caller_has_gone_is_not_started() -> None:
    work, proceed = PromptWork(threads=1), threading.Event()
    started: list[str] = []
    first = asyncio.create_task(work.run("a", proceed.wait))
    waiting = {
        owner: asyncio.create_task(work.run(owner[0], lambda owner=owner: started.append(owner)))  # type: ignore[misc]
        for owner in ("a1", "a2", "b1")
    }
    await asyncio.sleep(0)
    waiting["a1"].cancel()
    await asyncio.sleep(0)
    proceed.set()
    await asyncio.gather(first, waiting["a2"], waiting["b1"])

    assert sorted(started) == ["a2", "b1"]


async def test_a_job_starts_if_the_caller_before_it_leaves_while_the_running_one_ends() -> None:
    work = PromptWork(threads=1)
    async with work._turn("me"):
        gone = asyncio.create_task(work.run("me", lambda: 1))
        waiting = asyncio.create_task(work.run("me", lambda: 2))
        await asyncio.sleep(0)
        gone.cancel()

    assert await asyncio.wait_for(waiting, 60) == 2
    assert gone.cancelled()


async def test_owners_take_turns() -> None:
    work, proceed = PromptWork(threads=1), threading.Event()
    order: list[str] = []
    first = asyncio.create_task(work.run("z", proceed.wait))
    await asyncio.sleep(0)
    jobs = [
        asyncio.create_task(work.run(owner, lambda owner=owner: order.append(owner)))  # type: ignore[misc]
        for owner in ("a", "a", "a", "b", "c")
    ]
    await asyncio.sleep(0)
    proceed.set()
    await asyncio.gather(first, *jobs)

    assert order == ["a", "b", "c", "a", "a"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": [{"role": "user", "content": ""}] * 5000}, "messages"),
        ({"chat_template_kwargs": {f"v{i}": 1 for i in range(100_000)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 100_000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": {"b": 1}}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": 2**40}}, "chat_template_kwargs"),
        ({"metadata": [{}] * 300_000}, "the request body"),
        ({"metadata": [0] * 5_000_000}, "the request body"),
    ],
)
async def test_requests_of_too_many_parts_are_refused(
    tmp_path: Path, fields: dict[str, Any], field: str
) -> None:
    async with a_served_head(tmp_path, chat_template=TEMPLATE) as head:
        await owners(head)
        answer = await head.send(routes.OPENAI_CHAT, a_chat("hi", **fields), HERS)

    assert answer.status == 400
    assert error_of(answer)["message"].startswith(field)
    assert len(answer.body) < 2000
