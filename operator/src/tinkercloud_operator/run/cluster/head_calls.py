"""HTTP client that asks session heads to save their state."""

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import quote

import aiohttp
import structlog
from pydantic import BaseModel, ValidationError

from tinkercloud_crds import labels
from tinkercloud_crds.names import Names
from tinkercloud_kube.client import Client
from tinkercloud_kube.errors import KubernetesError
from tinkercloud_operator.decide.session.actions import (
    GiveAway,
    HeadRequest,
    RemoveModel,
    SaveRequest,
    TakeBack,
)
from tinkercloud_protocol.heads.engine_scaling_settings import HOLD_SECONDS, Engines
from tinkercloud_protocol.heads.launch import HeadStatus, Saved
from tinkercloud_protocol.wire import routes

log = structlog.get_logger(__name__)

_STATUS_SECONDS = 3.0
"""How long a head may take to say what it can hold: pools wait meanwhile."""
_LATE_SECONDS = 30.0
"""Extra seconds, beyond HOLD_SECONDS, that a head may take to answer."""
_DROP_SECONDS = 10.0
"""Reserved for dropping a model whose last checkpoint could not be saved in time: it would occupy
memory of the cluster without a slot."""
_OF_PROXIES = (HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT)
"""Answers of proxies in front of a head, which may have done what it was asked for."""
_MAX_MESSAGE_BYTES = 4096
"""How much of an error's body is read."""


class _ErrorBody(BaseModel):
    """The body of an error of a head."""

    detail: str


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The result of a completed save."""

    latest_checkpoint: str | None


class SaveFailed(Exception):
    """A save request that failed; the message has the head's words.

    Args:
        message: what went wrong.
        is_refused: whether the head answered with an error: it has not done what it was asked for.
    """

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused


class HeadClient:
    """Sends save requests to heads, authenticated with their tokens. Belongs to one event loop."""

    def __init__(self, cluster: Client, client: aiohttp.ClientSession) -> None:
        self._cluster = cluster
        self._client = client

    async def save(self, session: str, request: HeadRequest) -> SaveResult:
        """Send a request to a head.

        Raises:
            SaveFailed: the head refused, or did not respond in time.
        """
        try:
            async with asyncio.timeout(request.timeout_seconds):
                if isinstance(request, RemoveModel):
                    return await self._remove(request)
                if isinstance(request, GiveAway | TakeBack):
                    return await self._move(request)
                return await self._save(session, request)
        except TimeoutError as error:
            seconds = f"{request.timeout_seconds:.0f}"
            raise SaveFailed(f"the head did not respond within {seconds} s") from error
        except aiohttp.ClientResponseError as error:
            raise SaveFailed(
                f"the head answered {error.status}: {error.message}",
                is_refused=error.status not in _OF_PROXIES,
            ) from error
        except (aiohttp.ClientError, KubernetesError, KeyError, ValueError) as error:
            raise SaveFailed(f"{type(error).__name__}: {error}") from error

    async def needed_engines(self, session: str, url: str, engines: int) -> int | None:
        """Return how many engines a head needs; None if it did not answer.

        Args:
            session: name of its session.
            url: URL of the head.
            engines: how many engines exist. The head answers once it needs another number, or after
                `engine_scaling.HOLD_SECONDS`.
        """
        body = Engines(engines=engines).model_dump_json().encode()
        try:
            async with asyncio.timeout(HOLD_SECONDS + _LATE_SECONDS):
                token = await self._token(session)
                answer = await self._call("POST", url + routes.HEAD_ENGINES, token, body)
            return Engines.model_validate_json(answer).engines
        except (aiohttp.ClientError, TimeoutError, KubernetesError, KeyError, ValueError) as error:
            log.info(
                "a head did not say how many engines it needs; retrying",
                session=session,
                error=f"{type(error).__name__}: {error}",
            )
            return None

    async def head_status(self, session: str, url: str) -> HeadStatus:
        """Return the status of a head, which has what its memory can hold.

        Args:
            session: name of its session.
            url: URL of the head.

        Raises:
            TimeoutError: it did not answer in time, or the answer is not one of a head.
        """
        try:
            async with asyncio.timeout(_STATUS_SECONDS):
                token = await self._token(session)
                answer = await self._call("GET", url + routes.HEAD_STATUS, token)
            return HeadStatus.model_validate_json(answer)
        except (aiohttp.ClientError, TimeoutError, KubernetesError, KeyError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            log.info(
                "a head did not say how many models it can hold", session=session, error=reason
            )
            raise TimeoutError(reason) from error

    async def _save(self, session: str, request: SaveRequest) -> SaveResult:
        token = await self._token(session)
        if request.kind == "suspend":
            await self._call("POST", request.url + routes.HEAD_SUSPEND, token)
            return SaveResult(latest_checkpoint=None)
        return await self._checkpoint(request.url + routes.HEAD_CHECKPOINT, token)

    async def _remove(self, request: RemoveModel) -> SaveResult:
        token, model = await self._token(request.cluster), quote(request.model_id)
        saved = await self._last_checkpoint(request, f"{routes.HEAD_CHECKPOINT}/{model}", token)
        await self._call("DELETE", f"{request.url}{routes.HEAD_MODELS}/{model}", token)
        return saved

    async def _move(self, request: GiveAway | TakeBack) -> SaveResult:
        token = await self._token(request.cluster)
        url = f"{request.url}{routes.HEAD_MOVE_MODEL}/{quote(request.model_id)}"
        await self._call("POST" if isinstance(request, GiveAway) else "DELETE", url, token)
        return SaveResult(latest_checkpoint=None)

    async def _last_checkpoint(self, request: RemoveModel, path: str, token: str) -> SaveResult:
        """Return the last checkpoint of a model; none if there is no time for another attempt.

        Raises:
            aiohttp.ClientError: the head refused, and there is time for another attempt.
        """
        seconds = request.timeout_seconds - _DROP_SECONDS
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                return await self._checkpoint(request.url + path, token)
        except (aiohttp.ClientError, TimeoutError) as error:
            if isinstance(error, aiohttp.ClientError) and seconds > _DROP_SECONDS:
                raise
            log.warning(
                "a run ends without a last checkpoint",
                model_id=request.model_id,
                error=f"{type(error).__name__}: {error}",
            )
            return SaveResult(latest_checkpoint=None)

    async def _checkpoint(self, url: str, token: str) -> SaveResult:
        saved = Saved.model_validate_json(await self._call("POST", url, token))
        return SaveResult(saved.checkpoints[-1] if saved.checkpoints else None)

    async def _call(self, method: str, url: str, token: str, body: bytes | None = None) -> bytes:
        headers = {routes.HEAD_TOKEN_HEADER: token}
        timeout = aiohttp.ClientTimeout(total=None, connect=5)
        async with self._client.request(
            method, url, headers=headers, timeout=timeout, data=body
        ) as response:
            if not response.ok:
                # aiohttp's own check would drop the body, which has the head's words.
                message = await _error_message(response)
                raise aiohttp.ClientResponseError(
                    response.request_info,
                    response.history,
                    status=response.status,
                    message=message,
                    headers=response.headers,
                )
            return await response.read()

    async def _token(self, session: str) -> str:
        secret = await self._cluster.secret(Names(session).token_secret)
        return secret[labels.TOKEN_KEY].decode()


async def _error_message(response: aiohttp.ClientResponse) -> str:
    """Return the words of an error; the HTTP reason if its body has none."""
    body = await response.content.read(_MAX_MESSAGE_BYTES)
    try:
        return _ErrorBody.model_validate_json(body).detail
    except ValidationError:
        return response.reason or "no message"
