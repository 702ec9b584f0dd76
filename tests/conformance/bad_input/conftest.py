"""Every kind of invalid request has a documented response, and the session can still train.

Requests with a position in a model's sequence (a seq_id) take that position: their future reports
invalid content with the category `user`. All other requests are rejected immediately with a 4xx
status whose `detail` says what to change.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from tinkercloud_testing.clients.raw_run import Run
from tinkercloud_testing.serving.servers import Server


@pytest.fixture(scope="module")
def run(server: Server) -> Run:
    return Run(server)


@pytest.fixture(autouse=True)
def the_session_still_trains(run: Run) -> Iterator[None]:
    yield
    assert np.isfinite(run.step())
    assert run.server.head_pids(), "the head died"
