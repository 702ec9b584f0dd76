"""Calls that create and delete the objects of a session head."""

import aiohttp

from tinkercloud_api.providers.base import HeadEndpoint, SessionProvider
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest, StateLost, Unavailable

HEAD_CALL_SECONDS = 30.0
"""Timeout of a call that does not compute."""

_REJECTIONS = {400: InvalidRequest, 410: StateLost, 503: Unavailable}
"""Errors of heads that have a message for the client."""
_UNSUPPORTED = {404, 405}
"""Responses of heads that have not the object, or, of earlier versions, not the route."""


class HeadCalls:
    """Idempotent calls to any head. Belongs to one event loop."""

    def __init__(self, provider: SessionProvider, client: aiohttp.ClientSession) -> None:
        self._provider = provider
        self._client = client

    async def put(self, endpoint: HeadEndpoint, path: str, body: str, seconds: float) -> None:
        """Create or replace an object of a head.

        Raises:
            Unavailable: the head did not respond.
            InvalidRequest: it rejects the object.
            StateLost: it lost the object's state.
        """
        await self._call("PUT", endpoint, path, body, seconds)

    async def post(self, endpoint: HeadEndpoint, path: str, body: str, seconds: float) -> bytes:
        """Send a request and return the response.

        Raises:
            Unavailable: the head did not respond, or can't do it now.
            InvalidRequest: it rejects the request.
            StateLost: it lost the state.
        """
        return await self._call("POST", endpoint, path, body, seconds)

    async def delete(
        self, endpoint: HeadEndpoint, path: str, unresponsive: set[HeadEndpoint]
    ) -> None:
        """Delete an object of a head, unless the head is one of `unresponsive`.

        Raises:
            Unavailable: the head did not respond; it is then one of `unresponsive`.
        """
        if endpoint in unresponsive:
            raise Unavailable("the session head did not respond to an earlier call")
        try:
            await self._call("DELETE", endpoint, path, None, HEAD_CALL_SECONDS)
        except Unavailable:
            unresponsive.add(endpoint)
            raise

    async def _call(
        self, method: str, endpoint: HeadEndpoint, path: str, body: str | None, seconds: float
    ) -> bytes:
        try:
            async with self._client.request(
                method,
                endpoint.url + path,
                data=body,
                headers={
                    routes.HEAD_TOKEN_HEADER: endpoint.token,
                    routes.GENERATION_HEADER: endpoint.generation,
                },
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as response:
                if response.status == routes.WRONG_GENERATION_STATUS:
                    self._provider.invalidate(endpoint)
                if response.status in _UNSUPPORTED:
                    raise Unavailable(
                        "the session head does not have this: the run has moved, so that the"
                        " request should be sent again, or its head is of an earlier version"
                    )
                rejection = _REJECTIONS.get(response.status)
                if rejection is not None:
                    raise rejection(str((await response.json())["detail"]))
                response.raise_for_status()
                return await response.read()
        except aiohttp.ClientResponseError as error:
            raise Unavailable(
                f"the session head answered with status {error.status}; send the request again"
            ) from None
        except (aiohttp.ClientError, TimeoutError) as error:
            # The text of the error may contain the head's address.
            raise Unavailable(
                f"the session head did not respond ({type(error).__name__}); send the request again"
            ) from None
