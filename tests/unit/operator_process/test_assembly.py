"""What a running operator consists of.

A merge can remove a task or a step together with nothing that fails. These lists are written out
here so that it can't be removed unnoticed.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tinkercloud_operator import __main__ as process
from tinkercloud_operator.__main__ import SHUTDOWN, STARTUP
from tinkercloud_operator.run import handlers, term
from tinkercloud_operator.run.controller import Controller
from tinkercloud_operator.run.leader import Leadership
from tinkercloud_operator.run.probes import Probes
from tinkercloud_operator.settings import Settings
from tinkercloud_testing.cluster.kube_api.memory_api import MOMENT, Connection, path_of
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.timeout(120)
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
    "campaign": "Leadership.run",
}
"""The coroutine of each task of a leader that has a name, apart from those of kopf."""
UNNAMED = {"run", "Leadership._config.<locals>.begin", "Informer.run"}
"""Coroutines of its other tasks: the process, its term, and the copy of the nodes."""
WATCHED = {
    "TrainingSession": "trainingsessions.v1alpha1.tinkercloud.dev",
    "BaseModel": "basemodels.v1alpha1.tinkercloud.dev",
    "Tenant": "tenants.v1alpha1.tinkercloud.dev",
    "RayCluster": "rayclusters.v1.ray.io",
    "Pod": "pods.v1",
    "Service": "services.v1",
    "ConfigMap": "configmaps.v1",
    "NetworkPolicy": "networkpolicies.v1.networking.k8s.io",
    "PodDisruptionBudget": "poddisruptionbudgets.v1.policy",
    "ResourceClaimTemplate": "resourceclaimtemplates.v1.resource.k8s.io",
    "Job": "jobs.v1.batch",
}
"""The kinds whose changes the controller notes, with kopf's names of them."""
LEASES = "leases.v1.coordination.k8s.io"
"""Watched to see whether watches work."""
ROUTES = ("/livez", "/readyz", "/metrics")
STEPS = [
    *("Probes.serve", "StopSignal.listen", "Leadership.run", "start of the watches"),
    *("end of the term", "Leadership.resign", "AppRunner.cleanup"),
]
"""What the steps of the startup and of the shutdown call, in order, and what the term does."""


def own_tasks(before: set[asyncio.Task[Any]]) -> Counter[tuple[str, str]]:
    """Count the new tasks with a coroutine of our packages by their name and coroutine."""
    found: Counter[tuple[str, str]] = Counter()
    for task in asyncio.all_tasks() - before:
        code = getattr(task.get_coro(), "cr_code", None)
        if code is not None and "/src/tinkercloud_" in code.co_filename:
            is_named = not task.get_name().startswith("Task-")
            found[task.get_name() if is_named else "", code.co_qualname] += 1
    return found


def watched() -> set[str]:
    """Return the kinds that kopf watches in the operator's namespace."""
    names = [task.get_name() for task in asyncio.all_tasks()]
    found = [name.removeprefix("watcher for ") for name in names if name.startswith("watcher for ")]
    return {name.removesuffix("@default") for name in found}


class Followed:
    """What a running operator calls, noted from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        self.noted: set[str] = set()
        """The kinds of objects that the controller has noted."""
        self.heartbeats = 0
        self.probes: list[web.AppRunner] = []

        def note(owner: type, name: str) -> None:
            original = getattr(owner, name)

            @wraps(original)
            def noting(*args: object) -> object:
                self.steps.append(f"{owner.__name__}.{name}")
                return original(*args)

            monkeypatch.setattr(owner, name, noting)

        serve, watch = Probes.serve, handlers.watch
        on_event, on_heartbeat = Controller.on_event, Probes.on_heartbeat

        async def serving(probes: Probes) -> web.AppRunner:
            self.steps.append("Probes.serve")
            self.probes.append(await serve(probes))
            return self.probes[-1]

        async def watching(*args: Any, on_started: Callable[[], None], **others: Any) -> None:
            def starting() -> None:
                # kopf has replaced the signal handlers.
                on_started()
                assert self.steps.pop() == "StopSignal.listen"
                self.steps.append("start of the watches")

            try:
                await watch(*args, on_started=starting, **others)
            finally:
                self.steps.append("end of the term")

        def noting_event(controller: Controller, kind: str, *args: Any) -> None:
            self.noted.add(kind)
            on_event(controller, kind, *args)

        def beating(probes: Probes) -> None:
            self.heartbeats += 1
            on_heartbeat(probes)

        note(process.StopSignal, "listen")
        note(Leadership, "run")
        note(Leadership, "resign")
        note(web.AppRunner, "cleanup")
        monkeypatch.setattr(Probes, "serve", serving)
        monkeypatch.setattr(term, "watch", watching)
        monkeypatch.setattr(Controller, "on_event", noting_event)
        monkeypatch.setattr(Probes, "on_heartbeat", beating)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Followed:
    return Followed(monkeypatch)


async def test_a_running_operator_has_all_tasks_watches_and_routes_and_takes_all_steps(
    connection: Connection, followed: Followed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = {"holderIdentity": None, "renewTime": MOMENT, "acquireTime": MOMENT}
    connection.api.put(LEASE, {"kind": "Lease", "spec": {**spec, "leaseDurationSeconds": 15}})
    monkeypatch.setenv("KUBECONFIG", str(connection.write_kubeconfig(tmp_path)))
    tasks = Counter([*TASKS.items(), *(("", name) for name in UNNAMED)])
    tasks["reconcile sessions", "Controller.work"] = SETTINGS.max_concurrent

    before = asyncio.all_tasks()
    running = asyncio.create_task(process.run(SETTINGS))
    async with asyncio.timeout(PATIENCE_SECONDS):
        # Requests, among others, are short tasks of their own.
        while own_tasks(before) != tasks or watched() != {*WATCHED.values(), LEASES}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        # The first one is that of the term, others come with events of the Lease.
        while followed.heartbeats < 2:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        followed.noted.clear()
        for kind in WATCHED:
            connection.api.put(
                path_of(kind, "one"), {"kind": kind, "spec": {}}, namespace="default"
            )
        while followed.noted != {*WATCHED}:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        [probes] = followed.probes
        served = {getattr(route.resource, "canonical", "") for route in probes.app.router.routes()}
        host, port = probes.addresses[0]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as client:
            answers = {path: (await client.get(path)).status for path in ROUTES}
        os.kill(os.getpid(), signal.SIGTERM)
        await running

    assert served == {*ROUTES}
    assert answers == dict.fromkeys(ROUTES, 200)
    assert {name for name, _ in tasks if name} - {"campaign"} == {term.RESYNC} | {
        worker.name for worker in term.WORKERS
    }
    assert followed.steps == STEPS
    assert own_tasks(before) == Counter()
    assert len(STARTUP) + len(SHUTDOWN) == len(STEPS) - len(["start of the watches"])
