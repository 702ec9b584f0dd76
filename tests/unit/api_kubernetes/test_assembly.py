"""What a running API server consists of in addition if its session heads are pods.

A merge can remove a watch or a step together with nothing that fails. These lists are written out
here so that it can't be removed unnoticed; `http_api/test_assembly.py` has those of any server.
"""

import asyncio
from base64 import b64encode
from functools import wraps
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.base import Placement
from tinkercloud_api.providers.cluster.head_endpoints import HeadEndpoints
from tinkercloud_api.providers.cluster.kubernetes_programs import KubernetesPrograms
from tinkercloud_api.providers.cluster.kubernetes_provider import KubernetesProvider
from tinkercloud_api.providers.cluster.session_activity import ActivityAnnotator
from tinkercloud_api.providers.cluster.session_durability import DurabilityAnnotator
from tinkercloud_api.serve.api_app import running_context
from tinkercloud_crds.names import Names
from tinkercloud_kube.client import Client
from tinkercloud_testing.cluster.kube_api.memory_api import (
    MOMENT,
    Connection,
    a_memory_api,
    path_of,
)
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS
from tinkercloud_testing.serving.served_heads import TOKEN, ServedHead, a_served_head

pytestmark = pytest.mark.timeout(120)
OF_ANY_SERVER = {
    ("housekeeping", "_run_housekeeping"),
    ("care for heads", "_care_for_heads"),
    ("notify heads whose samples are kept", "SampledRuns.follow"),
    ("", "Deliveries._deliver_leftovers"),
    ("", "Programs._write_changes"),
}
WATCHES = {
    ("watch sessions", "Informer.run"),
    ("watch base models", "Informer.run"),
    ("watch tenants", "KnownTenants.run"),
}
LEASE = ("", "HeadEndpoints._hold_lease")
"""A task for each head in use."""
STARTUP: list[tuple[type, str]] = [
    (KubernetesProvider, "start"),
    (KubernetesPrograms, "start"),
]
SHUTDOWN: list[tuple[type, str]] = [
    (KubernetesPrograms, "close"),
    (KubernetesProvider, "stop"),
    (ActivityAnnotator, "stop"),
    (DurabilityAnnotator, "stop"),
    (HeadEndpoints, "stop"),
    (aiohttp.ClientSession, "close"),
    (Client, "close"),
]
"""The steps between the last request and the end of the provider. The watches end before them."""
OWN_FOLDERS = ("/src/tinkercloud_api/", "/src/tinkercloud_kube/")
SAMPLER = Placement("sampler", "me", "tiny/llama")


def follow(monkeypatch: pytest.MonkeyPatch, methods: list[tuple[type, str]]) -> list[str]:
    """Return the calls of methods from now on."""
    calls: list[str] = []

    def note(owner: type, name: str) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def noted(*args: object, **kwargs: object) -> object:
            calls.append(f"{owner.__name__}.{name}")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in methods:
        note(owner, name)
    return calls


def named(calls: list[tuple[type, str]]) -> list[str]:
    return [f"{owner.__name__}.{name}" for owner, name in calls]


def running(before: set[asyncio.Task[Any]]) -> set[tuple[str, str]]:
    """Return the names and coroutines of new tasks of the API server."""
    found = set()
    for task in asyncio.all_tasks() - before:
        code = getattr(task.get_coro(), "cr_code", None)
        if code is not None and any(each in code.co_filename for each in OWN_FOLDERS):
            is_named = not task.get_name().startswith("Task-")
            found.add((task.get_name() if is_named else "", code.co_qualname))
    return found


def make_ready(connection: Connection, name: str, head: ServedHead) -> None:
    """Store a session with its head, as the operator does."""
    secret = {"data": {"token": b64encode(TOKEN.encode()).decode()}}
    connection.api.put(path_of("Secret", Names(name).token_secret), secret)
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Ready",
        "message": "",
        "observedGeneration": 1,
        "lastTransitionTime": MOMENT,
    }
    status = {"conditions": [ready], "endpoint": head.url, "incarnation": "pod.0"}
    spec = {"baseModel": SAMPLER.base_model, "owner": SAMPLER.owner}
    content = {"spec": spec, "status": {**status, "observedGeneration": 1}}
    connection.api.put(path_of("TrainingSession", name), content, generation=1)


async def test_a_server_with_pods_as_heads_has_all_watches_and_takes_all_steps_of_its_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = KubernetesProvider("default", None)
    store = (tmp_path / "checkpoints").as_uri()
    settings = Settings(state_dir=tmp_path, provider="kubernetes", checkpoint_root=store)

    async with a_memory_api() as connection, a_served_head(tmp_path) as head:
        monkeypatch.setenv("KUBECONFIG", str(connection.write_kubeconfig(tmp_path)))
        started, before = follow(monkeypatch, STARTUP), asyncio.all_tasks()
        async with running_context(settings, provider), asyncio.timeout(PATIENCE_SECONDS):
            make_ready(connection, "one", head)
            while not provider.sessions.objects():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
            await provider.acquire(SAMPLER)
            # Calls of the database, among others, are short tasks of their own.
            while running(before) != {*OF_ANY_SERVER, *WATCHES, LEASE}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            stopped = follow(monkeypatch, SHUTDOWN)
        still_running = running(before)

    assert started == named(STARTUP)
    assert stopped[: len(SHUTDOWN)] == named(SHUTDOWN)
    assert not still_running
    assert {*provider.watches()} == {name for name, _ in WATCHES}
    # The steps before `ActivityAnnotator.stop` are those of other lists, and the end of the watches
    # is seen otherwise.
    assert len(provider.shutdown_steps()) == len(SHUTDOWN[2:]) + len(["watches"])
