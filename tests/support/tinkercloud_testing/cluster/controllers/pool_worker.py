"""The operator's worker of pools alone, on a real control plane.

There are no pods: tests write the status of clusters. The worker does the rest as in the operator:
it places runs, moves them, asks their heads, and deletes clusters.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import aiohttp
import pytest

from tinkercloud_crds import labels
from tinkercloud_kube.client import Client, ObjectRef
from tinkercloud_kube.errors import NotFound
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.pool.pool_facts import is_in_pool
from tinkercloud_operator.run.cluster.head_calls import HeadClient
from tinkercloud_operator.run.cluster.resource_store import Watched
from tinkercloud_operator.run.cluster.save_requests import HeadSaver
from tinkercloud_operator.run.pool.pool_memory import PoolMemory
from tinkercloud_operator.run.pool.pool_runner import Pools
from tinkercloud_operator.run.pool.spare_runner import Spares

_ACCEPTED = {
    "type": "Accepted",
    "status": "True",
    "reason": "Accepted",
    "message": "",
    "observedGeneration": 1,
    "lastTransitionTime": "2026-01-01T12:00:00Z",
}


class _PoolWorker:
    """The worker, with the objects that it watches. It accepts every run."""

    def __init__(self, cluster: Client, client: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.watched = Watched()
        heads = HeadClient(cluster, client)
        self.saver = HeadSaver(heads, self._note_saved)
        spares = Spares(self.watched, cluster, self._note, lambda _: None)
        self.pools = Pools(
            self.watched,
            cluster,
            self.saver,
            self._note,
            lambda _: None,
            spares=spares,
            memory=PoolMemory(heads),
        )
        self.is_accepted: set[str] = set()

    def _note_saved(self, session: str) -> None:
        self.pools.note_saved(session)

    def _note(self, kind: str, manifest: Manifest) -> None:
        self.watched.note(kind, manifest)
        self.pools.note(kind, manifest)

    async def list(self, kind: str) -> int:
        """Note all objects of a kind; return the version to watch it from."""
        page = await self.cluster.list_all(kind)
        for item in page.items:
            self._note(kind, item)
            await self._accept(kind, item)
        return page.version

    async def follow(self, kind: str, version: int) -> None:
        while True:
            async for event in self.cluster.watch(kind, version, 60):
                version = int(event.object["metadata"]["resourceVersion"])
                if event.type == "BOOKMARK":
                    continue
                is_gone = event.type == "DELETED"
                self.watched.note(kind, event.object, is_gone=is_gone)
                self.pools.note(kind, event.object, is_gone=is_gone)
                if not is_gone:
                    await self._accept(kind, event.object)

    async def _accept(self, kind: str, manifest: Manifest) -> None:
        """Accept a run, as the worker of sessions does."""
        name = manifest["metadata"]["name"]
        if kind != "TrainingSession" or not is_in_pool(manifest) or name in self.is_accepted:
            return
        self.is_accepted.add(name)
        patch = {"metadata": {"finalizers": [labels.FINALIZER]}}
        await self.cluster.merge(ObjectRef("TrainingSession", name), patch)
        status = {"conditions": [_ACCEPTED]}
        about = {"apiVersion": labels.API_VERSION, "kind": "TrainingSession"}
        await self.cluster.apply_status({**about, "metadata": {"name": name}, "status": status})

    async def release(self) -> None:
        """Remove the finalizers of all runs."""
        for name in self.is_accepted:
            patch: Manifest = {"metadata": {"finalizers": []}}
            with suppress(NotFound):
                await self.cluster.merge(ObjectRef("TrainingSession", name), patch)


async def _work(namespace: str, stop: asyncio.Event) -> None:
    cluster = await Client.connect(namespace, labels.OPERATOR_FIELD_MANAGER)
    async with aiohttp.ClientSession() as client:
        worker = _PoolWorker(cluster, client)
        # A pool whose BaseModel is not known would be taken down.
        versions = {kind: await worker.list(kind) for kind in ("BaseModel", "TrainingSession")}
        tasks = [
            asyncio.create_task(each)
            for each in (
                *(worker.follow(kind, version) for kind, version in versions.items()),
                worker.pools.work(),
                worker.saver.work(),
            )
        ]
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await worker.release()
        await cluster.close()
        for ended in done - {stopping}:
            ended.result()


@contextmanager
def a_pool_worker(kubeconfig: Path, namespace: str) -> Iterator[None]:
    """Run the worker in a thread."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(kubeconfig))
        thread = Thread(target=loop.run_until_complete, args=(_work(namespace, stop),))
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()
