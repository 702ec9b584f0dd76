"""A running server that is sent requests no program would send.

`FUZZ_CASES` is the number of cases of each test. `make fuzz` sends many more than CI does, in
pieces (tools/fuzz.py). Each writes what it has done to the file that `FUZZ_REPORT` names.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tinkercloud_testing.clients.raw_run import MODEL, Run
from tinkercloud_testing.harness.fuzzing import Cases
from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_llama

_GROWTH_BYTES = 256 << 20
"""The memory that all cases together may leave behind, in the server and its head each."""


@pytest.fixture(scope="session")
def cases() -> Iterator[Cases]:
    """Return the number of cases of each test."""
    found = Cases(int(os.environ.get("FUZZ_CASES", "150")))
    yield found
    if "FUZZ_REPORT" in os.environ:
        report = {"cases": found.sent, "growth": found.growth}
        Path(os.environ["FUZZ_REPORT"]).write_text(json.dumps(report))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run one server with a tiny model for all tests."""
    folder = save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: folder}) as running:
        yield running


@pytest.fixture(scope="module")
def run(server: Server) -> Run:
    """Return a training run with a model."""
    return Run(server)


@pytest.fixture(autouse=True)
def nothing_died_or_grew_and_the_run_still_trains(
    server: Server, run: Run, cases: Cases
) -> Iterator[None]:
    """Check after each test that the same processes are alive, and that training continues."""
    run.step()
    before = _memory(server)
    yield
    assert np.isfinite(run.step())
    after = _memory(server)
    assert after.keys() == before.keys(), "a process was replaced"
    growth = {pid: after[pid] - before[pid] for pid in after}
    cases.growth = max(cases.growth, *growth.values())
    assert max(growth.values()) < _GROWTH_BYTES, growth


def _memory(server: Server) -> dict[int, int]:
    """Return the resident bytes of the server and its heads by process id."""
    assert server.process is not None
    pids = [server.process.pid, *server.head_pids()]
    return {pid: psutil.Process(pid).memory_info().rss for pid in pids}
