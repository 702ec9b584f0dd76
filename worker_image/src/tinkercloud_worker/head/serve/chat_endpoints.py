"""OpenAI- and Anthropic-compatible requests: rendered, sampled, and answered token by token.

Each is executed as one sampling request per prompt, with its limits and its usage. Samplers
of this process report tokens as they decode them; those of inference servers only return whole
sequences, so a stream of theirs arrives in one piece. A client that disconnects cancels its
samples.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson
import structlog

from tinkercloud_protocol.heads.head_messages import RecordedSessionList
from tinkercloud_protocol.requests.sampling_requests import Chunk, ModelInput, SampleRequest
from tinkercloud_protocol.responses import chat_errors
from tinkercloud_protocol.responses.json_results import sample_as_json
from tinkercloud_protocol.wire import recorded_paths, routes
from tinkercloud_protocol.wire.asgi import Send, error_headers, respond
from tinkercloud_protocol.wire.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NotFound,
    Unavailable,
    WireError,
)
from tinkercloud_protocol.wire.future_responses import JSON, PROTOBUF
from tinkercloud_worker.chat import anthropic_messages, openai_requests
from tinkercloud_worker.chat.answer_parts import Part
from tinkercloud_worker.chat.anthropic_messages import MessageAnswer
from tinkercloud_worker.chat.chat_images import model_input
from tinkercloud_worker.chat.conversation import Asked, Choice, Counts, read_object
from tinkercloud_worker.chat.grammar.grammars import Grammar, Grammars
from tinkercloud_worker.chat.openai_answers import ChatAnswer, CompletionAnswer, ScoredToken
from tinkercloud_worker.chat.prompt_limits import check_body
from tinkercloud_worker.chat.recorded import RecordedSessions, Turn, datums
from tinkercloud_worker.chat.text import ChatText
from tinkercloud_worker.engine.sampling.sampler_interface import SampledToken
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.order.requests import Prepared
from tinkercloud_worker.head.serve.prompt_work import PromptWork
from tinkercloud_worker.head.serve.service import HeadService
from tinkercloud_worker.head.wire.head_http import Request

log = structlog.get_logger(__name__)

T = TypeVar("T")

_EVENTS = "text/event-stream; charset=utf-8"
_PARAMS = "sampling_params."
"""How messages about sampling requests name parameters, which here belong to the request itself."""


class WireAnswer(Protocol):
    """An answer in one of the wire formats."""

    def keep(self, index: int, parts: Sequence[Part]) -> None:
        """Keep parts of a choice for the whole answer."""

    def keep_prompt(self, index: int, text: str, scored: Sequence[ScoredToken]) -> None:
        """Keep the prompt of a choice for the whole answer, and its tokens if they were scored."""

    def begin(self, num_choices: int) -> bytes:
        """Return the beginning of the stream."""

    def add(
        self,
        index: int,
        parts: Sequence[Part],
        tokens: Sequence[SampledToken | ScoredToken],
    ) -> bytes:
        """Return the newest parts of a choice."""

    def finish(self, index: int, choice: Choice) -> bytes:
        """Return the end of a choice."""

    def end(self, counts: Counts) -> bytes:
        """Return the end of the stream."""

    def whole(self, choices: Sequence[Choice], counts: Counts) -> bytes:
        """Return the whole answer."""


def _ask_chat(body: bytes, text: ChatText) -> tuple[Asked, WireAnswer]:
    request = openai_requests.read_chat(body)
    asked = request.ask(text)
    return asked, ChatAnswer(request, asked, text)


def _ask_completion(body: bytes, text: ChatText) -> tuple[Asked, WireAnswer]:
    request = openai_requests.read_completion(body)
    asked = request.ask(text)
    return asked, CompletionAnswer(request, asked, text)


def _ask_message(body: bytes, text: ChatText) -> tuple[Asked, WireAnswer]:
    asked = anthropic_messages.read_messages(body).ask(text)
    return asked, MessageAnswer(asked)


_Format = Callable[[bytes, ChatText], tuple[Asked, WireAnswer]]


@dataclass(slots=True, eq=False)
class Run:
    """The samples of one request while they run."""

    asked: Asked
    answer: WireAnswer
    choices: list[Choice]
    grammar: Grammar | None = None
    """The form that the answers must have."""
    events: "asyncio.Queue[tuple[int, SampledToken | dict[str, Any] | WireError]]" = field(
        default_factory=asyncio.Queue
    )
    """Tokens, and the result or the error, of the prompt with this index."""
    request_ids: list[str] = field(default_factory=list)
    recorded: str | None = None
    """The recorded session that its turns are added to."""
    num_prompt_tokens: int = 0
    """Tokens of the prompts that have been prepared, with those of images."""
    cached: int = 0
    num_finished: int = 0
    """Prompts whose samples are finished."""

    @property
    def counts(self) -> Counts:
        """The tokens so far."""
        return Counts(
            self.num_prompt_tokens, sum(len(choice.tokens) for choice in self.choices), self.cached
        )

    def take(self, prompt: int, event: SampledToken | dict[str, Any] | WireError) -> bytes:
        """Add a token, or the result of a prompt; return the events of a stream.

        Raises:
            WireError: the event is this error.
        """
        if isinstance(event, WireError):
            raise event
        first = prompt * self.asked.num_choices
        if isinstance(event, SampledToken):
            return self._add(first + event.index, event)
        self.num_finished += 1
        self.cached += event["prompt_cache_hit_tokens"]
        stream: list[bytes] = []
        skips = self.asked.samples_nothing
        for index, sequence in enumerate(event["sequences"], first):
            choice = self.choices[index]
            if self.asked.echoed is not None:
                stream.append(self._echo(index, self.asked.echoed[prompt], event))
            unreported = _unreported(sequence, index - first, len(choice.tokens))
            stream += [self._add(index, token) for token in unreported if not skips]
            parts = choice.finish(is_complete=sequence["stop_reason"] == "stop" and not skips)
            self.answer.keep(index, parts)
            if self.asked.streams:
                stream += [self.answer.add(index, parts, ()), self.answer.finish(index, choice)]
        return b"".join(stream)

    def _echo(self, index: int, text: str, result: dict[str, Any]) -> bytes:
        scores = self.asked.scores_prompts
        scored = _scored(self.choices[index].prompt, result) if scores else ()
        self.answer.keep_prompt(index, text, scored)
        return self.answer.add(index, [text], scored) if self.asked.streams else b""

    def _add(self, index: int, token: SampledToken) -> bytes:
        choice = self.choices[index]
        parts = choice.add(token)
        self.answer.keep(index, parts)
        if not self.asked.streams:
            return b""
        return self.answer.add(index, parts, choice.shown[len(choice.tokens) - 1 :])


async def _taken(run: Run, prompt: int, event: SampledToken | dict[str, Any] | WireError) -> bytes:
    """Add an event to a run; whole sequences, which may have many tokens, in a thread."""
    if isinstance(event, dict):
        return await asyncio.to_thread(run.take, prompt, event)
    return run.take(prompt, event)


def _unreported(sequence: dict[str, Any], index: int, num_reported: int) -> list[SampledToken]:
    """Return the tokens of a finished sequence that were not reported while it ran."""
    tokens, logprobs = sequence["tokens"], sequence["logprobs"]
    tables = sequence.get("topk_sampled_logprobs") or [None] * len(tokens)
    return [
        SampledToken(index, tokens[at], logprobs[at], _columns(tables[at]))
        for at in range(num_reported, len(tokens))
    ]


def _scored(prompt: Sequence[int], result: dict[str, Any]) -> list[ScoredToken]:
    """Return the tokens of a prompt with their logprobs; the first has none."""
    tables = result.get("topk_prompt_logprobs") or [None] * len(prompt)
    scores = zip(prompt, result["prompt_logprobs"], tables, strict=True)
    return [ScoredToken(token, logprob, _columns(table)) for token, logprob, table in scores]


def _columns(row: list[list[Any]] | None) -> tuple[Sequence[int], Sequence[float]] | None:
    return ([pair[0] for pair in row], [pair[1] for pair in row]) if row else None


class HeadChat:
    """Serves the endpoints at a head. Belongs to one event loop."""

    def __init__(self) -> None:
        self._recorded = RecordedSessions()
        self._work = PromptWork()
        self._grammars = Grammars()

    async def serve(
        self,
        operation: "Operation",
        request: Request,
        service: HeadService,
        backend: Backend,
        send: Send,
    ) -> None:
        """Answer a request that the API server has authorized; failures become error responses.

        Args:
            operation: one of `OPERATIONS`.
            request: the request.
            service: executes the samples.
            backend: the served model.
            send: sends the answer (ASGI).
        """
        sending = _Sending(send, request.path)
        try:
            async with AsyncExitStack() as room:
                owner = service.owner_of(request.headers[routes.TARGET_HEADER])
                await room.enter_async_context(self._work.room(owner, request.body_bytes()))
                body = _Body(await request.body(), room)
                call = Call(request, owner, body, sending, service, backend, _text_of(backend))
                await request.run_until_disconnected(operation(self, call))
        except WireError as error:
            await sending.fail(error)
        except Exception:
            log.exception("unexpected error in a chat request", path=request.path)
            await sending.fail(WireError(chat_errors.INTERNAL_ERROR))

    async def chat(self, call: "Call") -> None:
        """POST chat/completions of OpenAI."""
        await self._sample(call, _ask_chat)

    async def complete(self, call: "Call") -> None:
        """POST completions of OpenAI."""
        await self._sample(call, _ask_completion)

    async def message(self, call: "Call") -> None:
        """POST messages of Anthropic."""
        await self._sample(call, _ask_message)

    async def count_tokens(self, call: "Call") -> None:
        """POST messages/count_tokens of Anthropic."""
        num_tokens = await self._read(call, partial(_count_tokens, call.text))
        await call.sending.whole(orjson.dumps({"input_tokens": num_tokens}))

    async def create_session(self, call: "Call") -> None:
        """Create a recorded session."""
        model = await self._read(call, _model_of)
        name = self._recorded.create(call.target, call.owner, model)
        await self._describe(call, name)

    async def show_session(self, call: "Call") -> None:
        """Describe a recorded session."""
        await self._describe(call, call.recorded())

    async def _describe(self, call: "Call", name: str) -> None:
        await call.sending.whole(self._recorded.session(name).model_dump_json().encode())

    async def models_of_session(self, call: "Call") -> None:
        """List the model of a recorded session, as GET models of OpenAI does."""
        session = self._recorded.session(call.recorded())
        model = {"id": session.model, "object": "model", "created": session.created}
        listed = {"object": "list", "data": [{**model, "owned_by": call.owner}]}
        await call.sending.whole(orjson.dumps(listed))

    def sessions_of(self, owner: str) -> RecordedSessionList:
        """Return the recorded sessions of an owner."""
        return RecordedSessionList(data=self._recorded.of_owner(owner))

    async def chat_in_session(self, call: "Call") -> None:
        """Add turns to a recorded session."""
        await self._sample(call, _ask_chat, call.recorded())

    async def datums(self, call: "Call") -> None:
        """Return the turns of a recorded session as training data."""
        recorded = call.recorded()
        turns = self._recorded.turns(recorded)

        def content() -> bytes:
            found = {"id": recorded, "num_turns": len(turns), "data": datums(turns)}
            return orjson.dumps(found)

        await call.sending.whole(await self._work.run(call.owner, content))

    async def delete_session(self, call: "Call") -> None:
        """Delete a recorded session."""
        self._recorded.delete(call.recorded())
        await call.sending.whole(b"{}")

    async def _sample(self, call: "Call", read: _Format, recorded: str | None = None) -> None:
        ask = partial(self._ask, read, call.text, call.backend)
        run = await self._read(call, ask)
        asked = run.asked
        if recorded is not None:
            if asked.images:
                raise InvalidRequest(
                    "messages: recorded sessions can't have images, since their turns are recorded"
                    " as tokens; send the request to chat/completions"
                )
            self._recorded.check_room(recorded, asked.model)
            run.recorded = recorded
        await self._run(run, call.target, call.sending, call.service, call.backend)

    def _ask(self, read: _Format, text: ChatText, backend: Backend, body: bytes) -> Run:
        """Read a request, and begin its choices. Runs in a thread: there may be many thousands.

        Raises:
            InvalidRequest: the request is invalid, or a prompt is too long.
        """
        check_body(body)
        asked, answer = read(body, text)
        most = backend.trainer.limits.max_context_length
        for prompt in asked.prompts:
            if len(prompt) > most:
                raise ContextLengthExceeded(asked.prompt_field, len(prompt), most)
        ends, grammar = backend.end_tokens | text.turn_ends, None
        if asked.rule is not None:
            try:
                grammar = self._grammars.compile(asked.rule, text, ends, asked.prompts[0])
            except (InvalidRequest, Unavailable) as error:
                if asked.rule.is_needed:
                    raise
                log.warning("the calls of an answer are not constrained", reason=error.message)
        return Run(asked, answer, _choices(asked, text, ends), grammar)

    async def _read(self, call: "Call", read: Callable[[bytes], T]) -> T:
        """Read a body when it is its owner's turn, and free it."""
        found = await self._work.run(call.owner, partial(read, call.body.take()))
        await call.body.room.aclose()
        return found

    def _record(self, run: Run, recorded: str) -> None:
        for choice in run.choices:
            ids = [token.token for token in choice.tokens]
            logprobs = [token.logprob for token in choice.tokens]
            self._recorded.add(recorded, Turn(choice.prompt, ids, logprobs))

    async def _run(
        self, run: Run, target: str, sending: "_Sending", service: HeadService, backend: Backend
    ) -> None:
        asked, tasks = run.asked, []
        try:
            for index in range(len(asked.prompts)):
                # Decoded images are large: they must not wait for a model that is resumed.
                await service.recall(target)
                job = partial(_prepared, run, index, target, service, backend)
                prepared = await backend.image_work.run(len(asked.images), job)
                listening = _listening(prepared, run, index)
                # It may have been suspended meanwhile.
                await service.recall(target)
                run.request_ids.append(str(service.sample(listening)))
                waiting = _put_result(run, index, run.request_ids[-1], service)
                tasks.append(asyncio.create_task(waiting))
            while run.num_finished < len(asked.prompts):
                stream = await _taken(run, *await run.events.get())
                while not run.events.empty():
                    stream += await _taken(run, *run.events.get_nowait())
                if asked.streams and stream:
                    if not sending.has_started:
                        stream = run.answer.begin(len(run.choices)) + stream
                    await sending.part(stream)
        finally:
            for request_id in run.request_ids:
                service.samples.cancel(request_id)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if run.recorded is not None:
            self._record(run, run.recorded)
        if asked.streams:
            await sending.last(run.answer.end(run.counts))
        else:
            whole = await asyncio.to_thread(run.answer.whole, run.choices, run.counts)
            await sending.whole(whole)


Operation = Callable[[HeadChat, "Call"], Coroutine[Any, Any, None]]
_SESSION = routes.OPENAI_SESSIONS + "/{id}"
OPERATIONS: tuple[tuple[str, str, Operation], ...] = (
    ("POST", routes.OPENAI_CHAT, HeadChat.chat),
    ("POST", routes.OPENAI_COMPLETIONS, HeadChat.complete),
    ("POST", routes.ANTHROPIC_MESSAGES, HeadChat.message),
    ("POST", routes.ANTHROPIC_COUNT_TOKENS, HeadChat.count_tokens),
    ("POST", routes.OPENAI_SESSIONS, HeadChat.create_session),
    ("POST", f"{_SESSION}/{recorded_paths.CHAT}", HeadChat.chat_in_session),
    ("POST", f"{_SESSION}/{recorded_paths.DATUMS}", HeadChat.datums),
    ("POST", f"{_SESSION}/{recorded_paths.MODELS}", HeadChat.models_of_session),
    ("POST", f"{_SESSION}/{recorded_paths.SHOW}", HeadChat.show_session),
    ("POST", f"{_SESSION}/{recorded_paths.DELETE}", HeadChat.delete_session),
)
"""Method, path and operation. API servers forward requests of all methods as POST."""


def _text_of(backend: Backend) -> ChatText:
    """Return how the model's conversations become tokens.

    Raises:
        InvalidRequest: there is no tokenizer.
    """
    if backend.text is None:
        raise InvalidRequest("this session head has no tokenizer for text; use asample")
    return backend.text


def _count_tokens(text: ChatText, body: bytes) -> int:
    check_body(body)
    return len(anthropic_messages.read_count_tokens(body).tokens(text))


def _model_of(body: bytes) -> str:
    check_body(body)
    return str(read_object(body).get("model"))


def _choices(asked: Asked, text: ChatText, ends: frozenset[int]) -> list[Choice]:
    return [
        Choice(text, prompt, ends, asked.stops, asked.reader(text), asked.thoughts(text, prompt))
        for prompt in asked.prompts
        for _ in range(asked.num_choices)
    ]


def _prepared(
    run: Run, index: int, target: str, service: HeadService, backend: Backend
) -> Prepared:
    """Return the sampling request of a prompt. Runs in a thread.

    Raises:
        InvalidRequest: the prompt is too long, or a parameter is invalid.
    """
    asked, length = run.asked, len(run.asked.prompts[index])
    prompt = ModelInput(chunks=[Chunk(tokens=list(asked.prompts[index]))])
    if asked.images:
        placeholder = backend.images.placeholder("messages")
        prompt = model_input(asked.prompts[index], asked.images, placeholder)
        parts = prompt.images()
        backend.images.check([("messages", parts)])
        length = backend.images.length(prompt.num_tokens, parts, "messages")
    if length > backend.trainer.limits.max_context_length:
        most = backend.trainer.limits.max_context_length
        raise ContextLengthExceeded(asked.prompt_field, length, most)
    run.num_prompt_tokens += length
    room = max(backend.trainer.limits.max_context_length - length + 1, 1)
    limit = asked.params.max_tokens
    params = asked.params.model_copy(
        update={"max_tokens": room if limit is None else min(limit, room)}
    )
    sample = SampleRequest(
        sampling_session_id=target,
        prompt=prompt,
        num_samples=asked.num_choices,
        sampling_params=params,
        topk_sample_logprobs=asked.top_logprobs,
        prompt_logprobs=asked.scores_prompts,
        topk_prompt_logprobs=asked.top_logprobs if asked.scores_prompts else 0,
    )
    try:
        return service.samples.prepare(sample)
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace(_PARAMS, "")) from None


def _listening(prepared: Prepared, run: Run, index: int) -> Prepared:
    """Return a request that reports its tokens to a run, and ends where turns end."""
    loop, put = asyncio.get_running_loop(), run.events.put_nowait

    def report(token: SampledToken) -> None:
        loop.call_soon_threadsafe(put, (index, token))

    validated = prepared.validated
    ends = frozenset(run.choices[0].ends)
    stop = replace(validated.stop, token_ids=validated.stop.token_ids | ends)
    on_token = None if run.asked.is_reported_whole else report
    validated = replace(validated, stop=stop, on_token=on_token, grammar=run.grammar)
    return replace(prepared, validated=validated)


async def _put_result(run: Run, index: int, request_id: str, service: HeadService) -> None:
    """Wait for the result of a prompt's samples, and report it to the run."""
    try:
        result = None
        while result is None:
            result = await service.retrieve(request_id)
            if result is None and not service.status().ready:
                # From then on no result is returned here, and waiting for one takes no time.
                raise Unavailable("the session head is stopping; send the request again")
        if result.content_type != PROTOBUF:
            failure = orjson.loads(result.body)
            kind = InvalidRequest if failure.get("category") == "user" else Unavailable
            raise kind(str(failure.get("error")))
        as_json = await asyncio.to_thread(sample_as_json, result.body)
        event: dict[str, Any] | WireError = orjson.loads(as_json)
    except WireError as error:
        event = error
    run.events.put_nowait((index, event))


@dataclass(slots=True)
class _Body:
    """The body of a request, and the room that its owner has for it."""

    content: bytes
    room: AsyncExitStack

    def take(self) -> bytes:
        """Return the body, without keeping it here."""
        content, self.content = self.content, b""
        return content


@dataclass(frozen=True, slots=True)
class Call:
    """A request and all that answers it."""

    request: Request
    owner: str
    """The owner of the sampling session."""
    body: _Body
    sending: "_Sending"
    service: HeadService
    backend: Backend
    text: ChatText

    @property
    def target(self) -> str:
        """The sampling session."""
        return self.request.headers[routes.TARGET_HEADER]

    def recorded(self) -> str:
        """Return the name of the recorded session in the path.

        Raises:
            NotFound: it is not one of the sampling session that the request was routed to.
        """
        found = self.request.recorded
        if found is None or found.sampler_id != self.target:
            name = self.request.path.removeprefix(routes.OPENAI_SESSIONS + "/").partition("/")[0]
            raise NotFound(f"recorded session {name[:256]!r} is unknown")
        return found.name


@dataclass(slots=True)
class _Sending:
    """The answer on the connection; an error after its beginning becomes its last event."""

    send: Send
    path: str
    has_started: bool = False

    async def part(self, stream: bytes) -> None:
        """Send a part of a stream."""
        if not self.has_started:
            self.has_started = True
            headers = [(b"content-type", _EVENTS.encode()), (b"cache-control", b"no-cache")]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": stream, "more_body": True})

    async def last(self, stream: bytes) -> None:
        """Send the end of a stream."""
        await self.part(stream)
        await self.send({"type": "http.response.body", "body": b""})

    async def whole(self, body: bytes) -> None:
        """Send a whole answer."""
        self.has_started = True
        await respond(self.send, body, content_type=JSON)

    async def fail(self, error: WireError) -> None:
        """Send an error."""
        if self.has_started:
            await self.last(chat_errors.error_event(self.path, error))
            return
        body, headers = chat_errors.error_bytes(self.path, error), error_headers(error)
        await respond(self.send, body, status=error.status, headers=headers)
