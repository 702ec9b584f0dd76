"""From a usable TrainingSession to the endpoint of its head: address, token, generation.

The token lies in a Secret and the generation is the head's own word, so both are read once for
each process that serves a session (`status.incarnation`), and kept.
"""

import asyncio
from dataclasses import dataclass

import aiohttp

from tinkercloud_api.providers.base import HeadEndpoint
from tinkercloud_api.providers.cluster_api import ClusterApi
from tinkercloud_api.providers.session_status import Ready, TrainingSessionView
from tinkercloud_crds import labels
from tinkercloud_protocol import routes
from tinkercloud_protocol.launch import HeadStatus

_STATUS_SECONDS = 10.0


class HeadUnresponsive(Exception):
    """A head that is said to be ready can't be asked who it is; asking again may help."""


@dataclass(frozen=True, slots=True)
class _Known:
    uid: str
    incarnation: str
    endpoint: HeadEndpoint


class HeadEndpoints:
    """Routes of live heads. Belongs to one event loop."""

    def __init__(self, api: ClusterApi, client: aiohttp.ClientSession) -> None:
        self._api = api
        self._client = client
        self._known: dict[str, _Known] = {}
        self._asking: dict[tuple[str, str], asyncio.Task[HeadEndpoint]] = {}

    def known(self, session: TrainingSessionView, usable: Ready) -> HeadEndpoint | None:
        """Return the endpoint of the process that serves a session now, if it is known already."""
        known = self._known.get(session.name)
        is_current = known is not None and (known.uid, known.incarnation) == (
            session.uid,
            usable.incarnation,
        )
        return known.endpoint if known is not None and is_current else None

    async def ask(self, session: TrainingSessionView, usable: Ready) -> HeadEndpoint:
        """Return the endpoint of the process that serves a session now.

        Raises:
            HeadUnresponsive: it does not answer, or its token is not there.
            ClusterUnreachable: its token can't be read now.
            ClusterRefused: its token may not be read.
        """
        known = self.known(session, usable)
        if known is not None:
            return known
        key = (session.uid, usable.incarnation)
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._ask(session, usable))
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(task)

    async def _ask(self, session: TrainingSessionView, usable: Ready) -> HeadEndpoint:
        secret = f"{session.name}-token"
        token = (await self._api.secret(secret)).get(labels.TOKEN_KEY, b"").decode().strip()
        if not token:
            raise HeadUnresponsive(f"Secret {secret} has no entry {labels.TOKEN_KEY!r}")
        status = await self._status(usable.endpoint, token)
        endpoint = HeadEndpoint(usable.endpoint, token, status.generation)
        self._known[session.name] = _Known(session.uid, usable.incarnation, endpoint)
        return endpoint

    async def _status(self, endpoint: str, token: str) -> HeadStatus:
        try:
            async with self._client.get(
                endpoint + routes.HEAD_STATUS,
                headers={routes.HEAD_TOKEN_HEADER: token},
                timeout=aiohttp.ClientTimeout(total=_STATUS_SECONDS),
                raise_for_status=True,
            ) as response:
                return HeadStatus.model_validate_json(await response.read())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            what = str(error) or type(error).__name__
            raise HeadUnresponsive(
                f"the session head at {endpoint} does not answer: {what}"
            ) from None

    def invalidate(self, endpoint: HeadEndpoint) -> None:
        """Forget an endpoint, so that its head is asked again."""
        for name, known in list(self._known.items()):
            if known.endpoint == endpoint:
                del self._known[name]

    def forget(self, name: str) -> None:
        """Forget the endpoint of a session that is no more."""
        self._known.pop(name, None)
