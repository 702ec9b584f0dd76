"""The taints of the cluster's nodes, kept up to date by list and watch."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog

from tinkercloud_crds.base_model import CORDON
from tinkercloud_kube.client import Client
from tinkercloud_kube.errors import KubernetesError, Rejected
from tinkercloud_kube.informer import Informer, pause_seconds
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.read import parsing

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Tainted:
    """A node with taints that keep new pods off it."""

    name: str
    keys: frozenset[str]


class NodeTaints:
    """Knows the taints that keep new pods off nodes. Belongs to one event loop."""

    def __init__(self, cluster: Client) -> None:
        """Create it without any nodes; `changes` fills it."""
        self.by_node: Mapping[str, frozenset[str]] = {}
        """Keys of the taints, by node; nodes without any are missing."""
        self._cluster = cluster
        self._nodes = Informer(cluster, "Node", self._kept)

    @property
    def cordoned(self) -> frozenset[str]:
        """The cordoned nodes."""
        return frozenset(name for name, keys in self.by_node.items() if CORDON in keys)

    async def changes(self) -> AsyncIterator[frozenset[str]]:
        """Yield the names of the nodes that have other taints than before, forever.

        Returns if the operator may not list nodes.
        """
        if not await self._is_permitted():
            return
        following = asyncio.create_task(self._nodes.run())
        try:
            while True:
                before, now = self.by_node, {it.name: it.keys for it in self._nodes.objects()}
                self.by_node = now
                both = before.keys() | now.keys()
                if changed := {name for name in both if before.get(name) != now.get(name)}:
                    yield frozenset(changed)
                else:
                    await self._nodes.any_change()
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following

    async def _is_permitted(self) -> bool:
        failures = 0
        while True:
            try:
                async for _ in self._cluster.pages("Node"):
                    return True
            except Rejected as error:
                log.info("not permitted to list nodes; their taints are ignored", error=str(error))
                return False
            except KubernetesError as error:
                failures += 1
                log.info("could not list nodes; retrying", error=str(error))
                await asyncio.sleep(pause_seconds(failures))

    def _kept(self, manifest: Manifest) -> _Tainted | None:
        """Return the taints of a node; the same object if they have not changed."""
        name, keys = manifest["metadata"]["name"], parsing.blocking_taints(manifest)
        known = self._nodes.get(name)
        if known is not None and known.keys == keys:
            return known
        return _Tainted(name, keys) if keys else None
