"""HTTP client that asks session heads to save their state."""

from dataclasses import dataclass

import aiohttp
import structlog

from tinkercloud_crds import labels
from tinkercloud_crds.names import Names
from tinkercloud_kube.client import Client
from tinkercloud_kube.errors import KubernetesError
from tinkercloud_operator.decide.actions import SaveRequest
from tinkercloud_protocol import routes
from tinkercloud_protocol.launch import Saved

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The result of a completed save."""

    latest_checkpoint: str | None


class HeadClient:
    """Sends save requests to heads, authenticated with their tokens. Belongs to one event loop."""

    def __init__(self, cluster: Client, client: aiohttp.ClientSession) -> None:
        self._cluster = cluster
        self._client = client

    async def save(self, session: str, request: SaveRequest) -> SaveResult | None:
        """Ask a head to save its state; return None if the save failed."""
        path = {"suspend": routes.HEAD_SUSPEND, "checkpoint": routes.HEAD_CHECKPOINT}[request.kind]
        try:
            token = await self._token(session)
            timeout = aiohttp.ClientTimeout(total=request.timeout_seconds, connect=5)
            async with self._client.post(
                request.url + path,
                headers={routes.HEAD_TOKEN_HEADER: token},
                timeout=timeout,
                raise_for_status=True,
            ) as response:
                body = await response.read()
            if request.kind == "suspend":
                return SaveResult(latest_checkpoint=None)
            saved = Saved.model_validate_json(body)
        except (aiohttp.ClientError, TimeoutError, KubernetesError, KeyError, ValueError) as error:
            log.warning(
                "the head did not save its state",
                session=session,
                kind=request.kind,
                error=f"{type(error).__name__}: {error}",
            )
            return None
        return SaveResult(saved.checkpoints[-1] if saved.checkpoints else None)

    async def _token(self, session: str) -> str:
        secret = await self._cluster.secret(Names(session).token_secret)
        return secret[labels.TOKEN_KEY].decode()
