"""The lease of a head: a connection that ends with either process. It carries its reports."""

import asyncio
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus

import aiohttp
import structlog
from pydantic import TypeAdapter, ValidationError

from tinkercloud_api.providers.base import HeadEndpoint, HeadReport, RecordReport
from tinkercloud_protocol.heads.durability_settings import DurabilityReport
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_protocol.wire.json_model import describe

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 1.0
_Line = HeadReport | DurabilityReport
_LINE = TypeAdapter[_Line](_Line)


async def hold_lease(
    client: aiohttp.ClientSession,
    endpoint: HeadEndpoint,
    record_report: RecordReport,
    note_durability: Callable[[DurabilityReport], None],
) -> None:
    """Hold the lease of a head until it has sent its last report and all are recorded.

    Args:
        client: sends the request.
        endpoint: of the head.
        record_report: called with each report of usage, a curve or samples, again if the catalog
            does not respond.
        note_durability: called when the head says which of its models are durable.

    Raises:
        aiohttp.ClientError: the head is gone, or does not accept the connection.
    """
    async with client.get(
        endpoint.url + routes.HEAD_LEASE,
        headers={routes.HEAD_TOKEN_HEADER: endpoint.token},
        timeout=aiohttp.ClientTimeout(total=None),
    ) as response:
        if response.status != HTTPStatus.OK:
            # aiohttp's own error contains the request headers, which include the token.
            raise aiohttp.ClientError(f"{routes.HEAD_LEASE} returned status {response.status}")
        async for line in _lines(response.content.iter_any()):
            try:
                report = _LINE.validate_json(line)
            except ValidationError as error:
                log.warning("ignoring an unreadable report of a head", error=describe(error))
                continue
            if isinstance(report, DurabilityReport):
                note_durability(report)
            else:
                await _record(report, record_report)


async def _record(report: HeadReport, record_report: RecordReport) -> None:
    """Record a report, when the catalog responds. Meanwhile the head collects what follows."""
    while True:
        try:
            await record_report(report)
        except Unavailable:
            await asyncio.sleep(_RETRY_SECONDS)
        except Exception:
            log.exception("a report of a head can't be recorded")
            # The lease must not end: the head would stop.
            return
        else:
            return


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield complete lines, of any length."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
