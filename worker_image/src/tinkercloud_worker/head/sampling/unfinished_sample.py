"""A sampling request that is not finished."""

import asyncio
from dataclasses import dataclass

from tinkercloud_protocol.requests.sampling_requests import SampleRequest


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampling request that is not finished."""

    request: SampleRequest
    owner: str
    size: int
    """Bytes it takes while it is queued."""
    task: asyncio.Task[None]
