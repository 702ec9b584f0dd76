"""Every kind of wrong request has a documented answer, and the session still trains afterwards.

Requests that name a place in a model's order (they carry a seq_id) take that place: what is wrong
with their content is told by their future, as category `user`. Everything else is refused at once
with a 4xx whose `detail` says what to change.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from tinkercloud_testing.raw_run import Run
from tinkercloud_testing.servers import Server


@pytest.fixture(scope="module")
def run(server: Server) -> Run:
    return Run(server)


@pytest.fixture(autouse=True)
def the_session_still_trains(run: Run) -> Iterator[None]:
    yield
    assert np.isfinite(run.step())
    assert run.server.head_pids(), "the head died"
