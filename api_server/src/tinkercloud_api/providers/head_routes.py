"""From a usable TrainingSession to the route of its head: address, token, generation.

The token lies in a Secret and the generation is the head's own word, so both are read once for
each process that serves a session (`status.incarnation`), and kept.
"""

import asyncio
from dataclasses import dataclass

import aiohttp

from tinkercloud_api.providers.base import HeadRoute
from tinkercloud_api.providers.session_status import Session, Usable
from tinkercloud_crds import labels
from tinkercloud_crds.names import Names
from tinkercloud_kube.client import Client
from tinkercloud_protocol import routes
from tinkercloud_protocol.launch import HeadStatus

_STATUS_SECONDS = 10.0


class HeadSilent(Exception):
    """A head that is said to be ready can't be asked who it is; asking again may help."""


@dataclass(frozen=True, slots=True)
class _Known:
    uid: str
    incarnation: str
    route: HeadRoute


class HeadRoutes:
    """Routes of live heads. Belongs to one event loop."""

    def __init__(self, api: Client, client: aiohttp.ClientSession) -> None:
        self._api = api
        self._client = client
        self._known: dict[str, _Known] = {}
        self._asking: dict[tuple[str, str], asyncio.Task[HeadRoute]] = {}

    def known(self, session: Session, usable: Usable) -> HeadRoute | None:
        """Return the route of the process that serves a session now, if it is known already."""
        known = self._known.get(session.name)
        is_current = known is not None and (known.uid, known.incarnation) == (
            session.uid,
            usable.incarnation,
        )
        return known.route if known is not None and is_current else None

    async def ask(self, session: Session, usable: Usable) -> HeadRoute:
        """Return the route of the process that serves a session now.

        Raises:
            HeadSilent: it does not answer, or its token is not there.
            KubernetesError: its token could not be read.
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

    async def _ask(self, session: Session, usable: Usable) -> HeadRoute:
        secret = Names(session.name).token_secret
        token = (await self._api.secret(secret)).get(labels.TOKEN_KEY, b"").decode().strip()
        if not token:
            raise HeadSilent(f"Secret {secret} has no entry {labels.TOKEN_KEY!r}")
        status = await self._status(usable.endpoint, token)
        route = HeadRoute(usable.endpoint, token, status.generation)
        self._known[session.name] = _Known(session.uid, usable.incarnation, route)
        return route

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
            raise HeadSilent(f"the session head at {endpoint} does not answer: {what}") from None

    def mistrust(self, route: HeadRoute) -> None:
        """Forget a route, so that its head is asked again."""
        for name, known in list(self._known.items()):
            if known.route == route:
                del self._known[name]

    def forget(self, name: str) -> None:
        """Forget the route of a session that is no more."""
        self._known.pop(name, None)
