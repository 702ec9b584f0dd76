"""Responses to retrieve_future, as clients without an SDK read them.

A failure differs from a result in its beginning: only failures have the key `error`, and they begin
with it (`future_responses.failed`). So results are passed on as they arrive, without parsing them.
"""

from collections.abc import Mapping
from http import HTTPStatus

import orjson

from tinkercloud_protocol.wire.asgi import Message, Send
from tinkercloud_protocol.wire.future_responses import JSON, PENDING_STATUS

_FAILURE = b'{"error":'
_STATUS_OF_CATEGORY = {"user": HTTPStatus.BAD_REQUEST}
"""Statuses of failures by their category; 503 for all others."""


class Answer:
    """Receives the response to one retrieve_future request (ASGI) and reports what it is.

    Subclasses decide what the client receives. Responses with an error status are passed on.
    """

    def __init__(self, send: Send) -> None:
        self.client = send
        """Sends to the client."""
        self.is_pending = False
        """Whether the result is not ready."""
        self._start: Message = {}
        self._kept = b""
        """What was received of a body that is not passed on, or not yet."""
        self._is_passed_on = False

    async def send(self, message: Message) -> None:
        """Receive a part of the response."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._kept += message.get("body", b"")
        has_more = bool(message.get("more_body"))
        if self._is_passed_on:
            await self.pass_on(self._taken(), has_more=has_more)
        elif self._start["status"] != HTTPStatus.OK:
            if not has_more:
                await self._end()
        elif len(self._kept) >= len(_FAILURE) and not self._kept.startswith(_FAILURE):
            self._is_passed_on = True
            await self.begin(self._start)
            await self.pass_on(self._taken(), has_more=has_more)
        elif not has_more:
            await self._end()

    async def _end(self) -> None:
        body, status = self._taken(), self._start["status"]
        if status == PENDING_STATUS:
            self.is_pending = True
            await self.pending(body)
        elif status != HTTPStatus.OK:
            await self.client(self._start)
            await self.client({"type": "http.response.body", "body": body})
        elif body.startswith(_FAILURE):
            failure = orjson.loads(body)
            await self.failed(str(failure["error"]), str(failure["category"]))
        else:
            await self.begin(self._start)
            await self.pass_on(body, has_more=False)

    def _taken(self) -> bytes:
        taken, self._kept = self._kept, b""
        return taken

    async def pending(self, body: bytes) -> None:
        """Report that the result is not ready."""

    async def failed(self, message: str, category: str) -> None:
        """Report a failure."""
        raise NotImplementedError

    async def begin(self, start: Message) -> None:
        """Begin the response with a result."""
        raise NotImplementedError

    async def pass_on(self, chunk: bytes, *, has_more: bool) -> None:
        """Pass on a part of the result."""
        await self.client({"type": "http.response.body", "body": chunk, "more_body": has_more})

    async def respond(self, content: Mapping[str, object], status: int = HTTPStatus.OK) -> None:
        """Send a short JSON response."""
        body = orjson.dumps(content)
        length = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", JSON.encode()), length]
        await self.client({"type": "http.response.start", "status": status, "headers": headers})
        await self.client({"type": "http.response.body", "body": body})


class StateAnswer(Answer):
    """Answers with `{"status": "pending" | "completed" | "failed", "result", "error"}`."""

    async def pending(self, body: bytes) -> None:
        """See `Answer.pending`."""
        reason = orjson.loads(body).get("queue_state_reason")
        content = {"status": "pending", "result": None, "error": None}
        await self.respond({**content, "reason": reason} if reason else content)

    async def failed(self, message: str, category: str) -> None:
        """See `Answer.failed`."""
        content = {"status": "failed", "result": None, "error": message, "category": category}
        await self.respond(content)

    async def begin(self, start: Message) -> None:
        """See `Answer.begin`."""
        del start
        headers = [(b"content-type", JSON.encode())]
        await self.client({"type": "http.response.start", "status": 200, "headers": headers})
        opening = b'{"status":"completed","error":null,"result":'
        await super().pass_on(opening, has_more=True)

    async def pass_on(self, chunk: bytes, *, has_more: bool) -> None:
        """See `Answer.pass_on`."""
        await super().pass_on(chunk if has_more else chunk + b"}", has_more=has_more)


class ResultAnswer(Answer):
    """Answers with the result itself, or with the status and `{"detail"}` of its failure.

    Nothing is sent while the result is not ready.
    """

    async def failed(self, message: str, category: str) -> None:
        """See `Answer.failed`."""
        status = _STATUS_OF_CATEGORY.get(category, HTTPStatus.SERVICE_UNAVAILABLE)
        await self.respond({"detail": message}, status)

    async def begin(self, start: Message) -> None:
        """See `Answer.begin`."""
        await self.client(start)
