"""The playground: one question to a base model and to a checkpoint, and both answers."""

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

import orjson
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.effects import WORKS, declares, names_no_object
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.runs.indexed_checkpoints import CheckpointSearch
from tinkercloud_api.console.pages import Sent, Session, page_router, read, show
from tinkercloud_api.console.questions import PATHS, Kind, answer_of, body_of
from tinkercloud_api.context import Context, Server
from tinkercloud_api.providers.head_http_client import HeadUnreachable
from tinkercloud_api.routes.models import chat_routes
from tinkercloud_api.routes.requests.call import Call
from tinkercloud_api.web.asgi_http import HotRequest
from tinkercloud_protocol.wire.asgi import Message
from tinkercloud_protocol.wire.errors import WireError
from tinkercloud_protocol.wire.json_model import Name
from tinkercloud_protocol.wire.paths import CheckpointKind

_SECONDS = 60.0
"""How long a browser waits for answers at most."""
_CHECKPOINTS = 500
"""Checkpoints to choose from, the newest."""
_MAX_TOKENS = 512
_SHORT = 200
"""Characters of a prompt that the command in the foot of the page has at most."""
_BLANK = {
    **dict.fromkeys(("base_model", "checkpoint", "kind", "prompt", "seed"), ""),
    "max_tokens": "64",
    "temperature": "1",
}
"""Initial values of the form."""

router = page_router()


def _with_line_feeds(text: str) -> str:
    """Return a text as it was written: forms send the end of a line as two characters."""
    return text.replace("\r\n", "\n")


class _Question(BaseModel):
    """The fields of the form."""

    model_config = ConfigDict(allow_inf_nan=False)

    base_model: Name
    checkpoint: Annotated[str, Field(max_length=1024)] = ""
    """Path of a checkpoint, or id of a run; empty for none."""
    kind: Kind = "chat"
    prompt: Annotated[
        str, BeforeValidator(_with_line_feeds), Field(min_length=1, max_length=20_000)
    ]
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] = 64
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None

    def body(self, model: str) -> bytes:
        """Return the body of the request to a model."""
        others = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        return orjson.dumps(body_of(self.kind, self.prompt, model=model, **others))

    def command(self) -> str:
        """Return the command that asks the same in a terminal."""
        is_short = len(self.prompt) <= _SHORT and self.prompt.isprintable() and self.prompt != "-"
        words = [self.base_model, self.prompt if is_short else "-"]
        if any(each.startswith("-") for each in words if each != "-"):
            words.insert(0, "--")
        options = ["--as", self.kind, "--max-tokens", str(self.max_tokens)]
        options += ["--temperature", str(self.temperature)]
        options += ["--seed", str(self.seed)] if self.seed is not None else []
        options += ["--compare", self.checkpoint] if self.checkpoint else []
        asked = shlex.join(["tinkercloud", "ask", *options, *words])
        return asked if is_short else f"{asked} < prompt.txt"


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer of a model, or the reason for its absence."""

    model: str
    text: str = ""
    tokens: Sequence[tuple[str, float]] = ()
    """Its tokens with their logprobs."""
    problem: str | None = None
    """Why there is no answer."""


@router.get("/playground")
@names_no_object
async def show_playground(server: Server, session: Session) -> Response:
    """Show the form of a question."""
    return await _shown(server, session, {}, [], "tinkercloud ask MODEL TEXT")


@router.post("/playground")
@declares(WORKS)
async def ask(sent: Sent, server: Server, session: Session) -> Response:
    """Ask a base model, and a checkpoint if one is chosen, and show their answers."""
    question = read(_Question, sent)
    models = [question.base_model, *([question.checkpoint] if question.checkpoint else [])]
    answers = [_answer(model, question, server, session.caller) for model in models]
    found = await asyncio.gather(*answers)
    return await _shown(server, session, sent, found, question.command())


async def _shown(
    server: Context,
    session: Session,
    sent: Mapping[str, str],
    answers: Sequence[_Answer],
    command: str,
) -> Response:
    saved = await server.checkpoints.search(
        CheckpointSearch(
            visible=session.caller.visible("accessible"),
            kind=CheckpointKind.SAMPLER,
            limit=_CHECKPOINTS,
        )
    )
    return await show(
        "playground.html",
        session=session,
        models=[model.name for model in server.provider.models()],
        checkpoints=[each.tinker_path for each in saved],
        may_ask=session.caller.role is not Role.READ_ONLY,
        max_tokens=_MAX_TOKENS,
        sent={**_BLANK, **sent},
        answers=answers,
        command=command,
    )


async def _answer(model: str, question: _Question, server: Context, caller: Principal) -> _Answer:
    """Return the answer of a model, or the reason for its absence."""
    seconds = min(_SECONDS, server.settings.sample_wait_seconds)
    try:
        async with asyncio.timeout(seconds):
            status, content = await _sampled(model, question, server, caller)
    except TimeoutError:
        why = (
            f"no answer within {seconds:g} s: the model loads or is busy, as the page Models shows;"
            " ask again, or for fewer tokens"
        )
        return _Answer(model, problem=why)
    except WireError as error:
        return _Answer(model, problem=error.message)
    except HeadUnreachable as error:
        return _Answer(model, problem=f"{error}; ask again")
    if status != HTTPStatus.OK:
        return _Answer(model, problem=str(content["error"]["message"]))
    return _Answer(model, *answer_of(question.kind, content))


async def _sampled(
    model: str, question: _Question, server: Context, caller: Principal
) -> tuple[int, Any]:
    """Send the request that a client of the OpenAI API would send.

    Returns:
        The status and the JSON of its response.

    Raises:
        WireError: it was refused before it reached a session head.
    """
    path = PATHS[question.kind]
    body, response = question.body(model), list[Message]()
    waiting: asyncio.Queue[Message] = asyncio.Queue()
    waiting.put_nowait({"type": "http.request", "body": body})
    headers = [(b"content-type", b"application/json")]
    # After the body, it waits like a client that stays connected.
    request = HotRequest(
        {"method": "POST", "path": path, "headers": headers}, waiting.get, len(body)
    )

    async def keep(message: Message) -> None:
        response.append(message)

    call = Call(server, request, keep, caller)
    await chat_routes.forward(call)
    content = b"".join(message.get("body", b"") for message in response)
    return call.status or HTTPStatus.SERVICE_UNAVAILABLE, orjson.loads(content)
