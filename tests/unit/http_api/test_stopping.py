"""A server that stops although its disk is full."""

import errno
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import running_context
from tinkercloud_protocol.wire.errors import Unavailable
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.storage.disks import no_files_over

KEY = "tml-a-valid-key-of-these-tests"


class UnsavingHeads(OneHead):
    """A provider whose heads can't be stopped properly."""

    async def stop(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_server_stops_on_a_full_disk_without_an_error(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path, bootstrap_key=KEY)

    with ExitStack() as until_it_has_stopped:
        async with running_context(settings, UnsavingHeads()) as known:
            (key,) = await known.catalog.keys()
            known.activity.use_key(key.id)
            # The catalog is longer, and what pytest captures is not.
            until_it_has_stopped.enter_context(no_files_over(16 << 10))
            with pytest.raises(Unavailable):
                await known.activity.write()
