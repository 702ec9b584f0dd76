"""A server that stops although its disk is full."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import running_context
from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_testing.providers import OneHead

KEY = "tml-a-valid-key-of-these-tests"


class UnsavingHeads(OneHead):
    """A provider whose heads can't be stopped properly."""

    async def stop(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def limit_files() -> Iterator[Callable[[], None]]:
    """Return a function that makes writes beyond 16 KiB of a file fail until the test ends.

    The catalog is longer, and what pytest captures is not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_server_stops_on_a_full_disk_without_an_error(
    tmp_path: Path, limit_files: Callable[[], None]
) -> None:
    settings = Settings(state_dir=tmp_path, bootstrap_key=KEY)

    async with running_context(settings, UnsavingHeads()) as known:
        (key,) = await known.catalog.keys()
        known.activity.use_key(key.id)
        limit_files()
        with pytest.raises(Unavailable):
            await known.activity.write()
