"""What bodies of the JSON routes may be, before anything parses them."""

from collections.abc import MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from tinkercloud_api.http import Receive, Scope, Send, check_content_encoding, respond_error
from tinkercloud_protocol.errors import BodyTooLarge, InvalidRequest


class BodyLimitMiddleware:
    """ASGI middleware: a body over the limit is answered 413 and read no further.

    One that is compressed is answered 400.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if (encoding := headers.get(b"content-encoding")) is not None:
            try:
                check_content_encoding({"content-encoding": encoding.decode("latin-1")})
            except InvalidRequest as error:
                await respond_error(send, error)
                return
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await respond_error(send, BodyTooLarge(self._message()))
            return
        size = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                # The one exception FastAPI lets through while it reads a body.
                raise HTTPException(BodyTooLarge.status, self._message())
            return message

        await self._app(scope, counted, send)

    def _message(self) -> str:
        return f"body is larger than {self._max_bytes} bytes"
