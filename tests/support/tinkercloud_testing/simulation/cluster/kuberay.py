"""A simulated KubeRay: it makes the pods of RayClusters."""

from collections.abc import Mapping
from itertools import count
from typing import Any

from tinkercloud_testing.simulation.cluster.api_server import ApiServer, Json

_CLUSTER = "ray.io/cluster"
_GROUP = "ray.io/group"
_HEAD = "headgroup"


class KubeRay:
    """The controller of RayClusters.

    Args:
        server: the API server.
        knows_owners: whether pods of an earlier RayCluster of the same name do not count. KubeRay
            1.6 selects pods by the name of their cluster, so that they do.
    """

    def __init__(self, server: ApiServer, *, knows_owners: bool) -> None:
        self._server = server
        self._knows_owners = knows_owners
        self._numbers = count(1)

    def sync(self) -> None:
        """Create missing pods, and delete surplus and failed ones."""
        for cluster in self._server.all("RayCluster"):
            metadata = cluster["metadata"]
            if "deletionTimestamp" in metadata:
                continue
            pods = self._pods_of(cluster)
            if cluster["spec"].get("suspend"):
                for pod in pods:
                    self._delete(pod)
            else:
                self._sync_group(cluster, pods, _HEAD, cluster["spec"]["headGroupSpec"], 1)
                for group in cluster["spec"].get("workerGroupSpecs", []):
                    wanted = int(group.get("replicas", 0))
                    self._sync_group(cluster, pods, group["groupName"], group, wanted)
            status = {"observedGeneration": metadata["generation"]}
            self._server.update("RayCluster", metadata["name"], {"status": status})

    def _pods_of(self, cluster: Json) -> list[Json]:
        metadata = cluster["metadata"]
        return [
            pod
            for pod in self._server.all("Pod")
            if pod["metadata"]["labels"].get(_CLUSTER) == metadata["name"]
            and (not self._knows_owners or _owner(pod) == metadata["uid"])
        ]

    def _sync_group(
        self, cluster: Json, pods: list[Json], name: str, group: Mapping[str, Any], wanted: int
    ) -> None:
        own = [pod for pod in pods if pod["metadata"]["labels"][_GROUP] == name]
        failed = [pod for pod in own if pod.get("status", {}).get("phase") == "Failed"]
        for pod in failed:
            self._delete(pod)
        if failed:
            return
        for pod in own[wanted:] if name != _HEAD else ():
            self._delete(pod)
        for _ in range(wanted - len(own)):
            self._create(cluster, name, group)

    def _create(self, cluster: Json, group: str, spec: Mapping[str, Any]) -> None:
        metadata, template = cluster["metadata"], spec["template"]
        part = "head" if group == _HEAD else group
        owner = {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
        }
        found = {**template["metadata"]["labels"], _CLUSTER: metadata["name"], _GROUP: group}
        self._server.create(
            "Pod",
            {
                "metadata": {
                    "name": f"{metadata['name']}-{part}-{next(self._numbers)}",
                    "labels": found,
                    "ownerReferences": [owner],
                },
                "spec": template["spec"],
                "status": {"phase": "Pending"},
            },
        )

    def _delete(self, pod: Json) -> None:
        if "deletionTimestamp" not in pod["metadata"]:
            self._server.delete("Pod", pod["metadata"]["name"])


def _owner(pod: Json) -> str | None:
    owners = pod["metadata"].get("ownerReferences", [])
    return next((str(owner["uid"]) for owner in owners), None)
