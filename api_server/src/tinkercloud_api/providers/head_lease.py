"""The lease of a head: a connection that ends with either process. It carries usage reports."""

from collections.abc import AsyncIterator
from http import HTTPStatus

import aiohttp
import structlog
from pydantic import ValidationError

from tinkercloud_api.providers.base import HeadEndpoint, RecordUsage
from tinkercloud_protocol import routes
from tinkercloud_protocol.errors import Unavailable
from tinkercloud_protocol.usage import UsageReport
from tinkercloud_protocol.wire import describe

log = structlog.get_logger(__name__)


async def hold_lease(
    client: aiohttp.ClientSession, endpoint: HeadEndpoint, record_usage: RecordUsage
) -> None:
    """Hold the lease of a head and record its reports, until it has sent the last one.

    Raises:
        aiohttp.ClientError: the head is gone, or does not accept the connection.
        Unavailable: a report was not recorded; another connection begins with all of them.
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
                report = UsageReport.model_validate_json(line)
            except ValidationError as error:
                log.warning("ignoring an unreadable usage report", error=describe(error))
                continue
            try:
                await record_usage(report)
            except Unavailable:
                raise
            except Exception:
                # The lease must not end, and the next report has the same totals or larger ones.
                log.exception("a usage report was not recorded")


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield complete lines, of any length."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
