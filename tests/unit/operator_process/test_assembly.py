"""What a running operator consists of.

A merge can remove a task or a step together with nothing that fails. These lists are written out
here so that it can't be removed unnoticed.
"""

import asyncio
import os
import signal
from collections import Counter
from functools import wraps

import pytest
from aiohttp.web import AppRunner

from tinkercloud_operator import __main__ as process
from tinkercloud_operator.__main__ import SHUTDOWN, STARTUP
from tinkercloud_operator.run import term
from tinkercloud_operator.run.leader import Leadership
from tinkercloud_operator.run.probes import Probes
from tinkercloud_operator.settings import Settings
from tinkercloud_testing.cluster.kube_api.memory_api import MOMENT, Connection
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS

LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/tinkercloud-operator"
SETTINGS = Settings(identity="me", max_concurrent=3, probe_host="127.0.0.1", probe_port=0)
TASKS = {
    "list all objects": "resync",
    "reconcile sessions": "Controller.work",
    "maintain base models": "Controller.work_on_base_models",
    "maintain tenants": "Controller.work_on_tenants",
    "maintain pools": "Controller.work_on_pools",
    "scale engines": "Controller.scale_engines",
    "send save requests": "Controller.save_heads",
    "check definitions": "Controller.watch_definitions",
    "watch nodes": "Controller.watch_nodes",
    "count sessions": "Controller.count",
}
"""The coroutine of each task of a leader, apart from the watches."""
STEPS = [
    *("Probes.serve", "StopSignal.listen", "Leadership.run"),
    *("end of the term", "Leadership.resign", "AppRunner.cleanup"),
]
"""What the steps of the startup and of the shutdown call, in order."""


def of_leader(task: asyncio.Task[object]) -> tuple[str, str]:
    """Return the name and the coroutine of a task."""
    return task.get_name(), getattr(task.get_coro(), "__qualname__", "")


async def test_a_running_operator_has_all_tasks_and_takes_all_steps_of_its_lists(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"holderIdentity": None, "renewTime": MOMENT, "acquireTime": MOMENT}
    connection.api.put(LEASE, {"kind": "Lease", "spec": {**spec, "leaseDurationSeconds": 15}})
    steps: list[str] = []
    watching = asyncio.Event()

    def note(owner: type, name: str) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def noted(*args: object) -> object:
            steps.append(f"{owner.__name__}.{name}")
            return original(*args)

        monkeypatch.setattr(owner, name, noted)

    async def watch(*_: object, **__: object) -> None:
        """Watch nothing: the API in memory has no watches."""
        watching.set()
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("end of the term")

    async def credentials() -> object:
        return connection.client.configuration

    for owner, name in (
        (Probes, "serve"),
        (process.StopSignal, "listen"),
        (Leadership, "run"),
        (Leadership, "resign"),
        (AppRunner, "cleanup"),
    ):
        note(owner, name)
    monkeypatch.setattr(term, "watch", watch)
    monkeypatch.setattr(process, "credentials", credentials)

    running = asyncio.create_task(process.run(SETTINGS))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await watching.wait()
        found = Counter(map(of_leader, asyncio.all_tasks()))
        os.kill(os.getpid(), signal.SIGTERM)
        await running

    expected = Counter(TASKS.items())
    expected[("reconcile sessions", "Controller.work")] = SETTINGS.max_concurrent
    assert Counter({each: found[each] for each in found if each[0] in TASKS}) == expected
    assert {name for name, _ in found if name in TASKS} == {term.RESYNC} | {
        worker.name for worker in term.WORKERS
    }
    assert steps == STEPS
    assert len(STARTUP) + len(SHUTDOWN) == len(STEPS)
