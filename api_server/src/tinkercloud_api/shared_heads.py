"""Calls to the heads that many runs share: what they hold, and which models to suspend.

A client that ends without a word leaves its models in such a head. Once its session has had no
heartbeat, and a model no request, for `session_silence_seconds`, the head suspends the model, which
the next request brings back. Nothing is lost by silence, however long it lasts.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

import aiohttp
import structlog

from tinkercloud_api.activity import Activity
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.providers.base import HeadEndpoint, SessionProvider
from tinkercloud_protocol import routes
from tinkercloud_protocol.errors import Unavailable
from tinkercloud_protocol.launch import HeldModel, HeldModels, ModelSuspended

log = structlog.get_logger(__name__)

_LIST_SECONDS = 10.0
_SUSPEND_SECONDS = 600.0
"""A head answers once it has written all of a model."""
_ROUNDS_MISSED = 3
"""After so many the machine slept, or this process was stopped: its clients were not heard."""


class SharedHeads:
    """The heads of this server that hold models of many clients."""

    def __init__(
        self,
        catalog: Catalog,
        provider: SessionProvider,
        activity: Activity,
        client: aiohttp.ClientSession,
        *,
        silence: timedelta,
        period: timedelta,
    ) -> None:
        """Make it.

        Args:
            catalog: knows when sessions and runs were last heard of.
            provider: knows the heads.
            activity: what is not in the catalog yet.
            client: for calls to heads.
            silence: of a client, after which its models are suspended.
            period: between two rounds of `suspend_inactive`.
        """
        self._catalog = catalog
        self._provider = provider
        self._activity = activity
        self._client = client
        self._silence = silence
        self._longest_pause = period * _ROUNDS_MISSED
        self._listening_since: datetime | None = None
        self._last_round: datetime | None = None

    async def models(self) -> dict[str, HeldModel]:
        """Return the models of all heads that answer, by id."""
        held: dict[str, HeldModel] = {}
        for endpoint in self._provider.shared_heads():
            try:
                held.update({model.model_id: model for model in await self._models_of(endpoint)})
            except Unavailable as error:
                log.warning("a session head does not tell what it holds", error=error.message)
        return held

    async def suspend_inactive(self, moment: datetime) -> None:
        """Suspend the models whose clients have been silent for long.

        Only what this server itself would have heard counts as silence: not the time before its
        start, nor while its machine slept.
        """
        last, self._last_round = self._last_round, moment
        if last is None or moment - last > self._longest_pause:
            self._listening_since = moment
        since = moment - self._silence
        if self._listening_since is None or self._listening_since > since:
            return
        await self._activity.write()
        for endpoint in self._provider.shared_heads():
            try:
                await self._suspend_inactive_in(endpoint, since)
            except Unavailable as error:
                log.warning("models without clients stay in memory", error=error.message)

    async def _suspend_inactive_in(self, endpoint: HeadEndpoint, since: datetime) -> None:
        in_memory = [m.model_id for m in await self._models_of(endpoint) if not m.is_suspended]
        for run_id in await self._catalog.inactive_runs(in_memory, since) if in_memory else []:
            path = f"{routes.HEAD_SUSPEND_MODEL}/{run_id}"
            answer = await self._call("POST", endpoint, path, _SUSPEND_SECONDS)
            if ModelSuspended.model_validate_json(answer).is_suspended:
                log.info("a silent client's model was suspended", run_id=run_id)

    async def _models_of(self, endpoint: HeadEndpoint) -> Sequence[HeldModel]:
        answer = await self._call("GET", endpoint, routes.HEAD_MODELS, _LIST_SECONDS)
        return HeldModels.model_validate_json(answer).models

    async def _call(self, method: str, endpoint: HeadEndpoint, path: str, seconds: float) -> bytes:
        headers = {
            routes.HEAD_TOKEN_HEADER: endpoint.token,
            routes.GENERATION_HEADER: endpoint.generation,
        }
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._client.request(
                method, endpoint.url + path, headers=headers, timeout=timeout
            ) as response:
                response.raise_for_status()
                return await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            # Not the error's own text, which may show the request's headers, and so the token.
            why = type(error).__name__
            raise Unavailable(f"the session head did not answer {path}: {why}") from None
