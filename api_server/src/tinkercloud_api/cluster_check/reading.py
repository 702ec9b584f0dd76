"""Reads what the checks need of a cluster, with the rights of the user, and changes nothing."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace

from tinkercloud_api.cluster_check import needs, rights
from tinkercloud_api.cluster_check.findings import ClusterFacts, Listed
from tinkercloud_api.cluster_check.platform import (
    KUBERAY_OPERATOR_LABEL,
    OWN_KINDS,
    QUEUES_API,
)
from tinkercloud_api.cluster_check.rights import Right
from tinkercloud_api.cluster_check.values import Release
from tinkercloud_crds import labels
from tinkercloud_crds.served_schemas import Schema, schema_of
from tinkercloud_kube.client import Client, ObjectRef
from tinkercloud_kube.errors import Rejected

_FORBIDDEN = 403
_KUBERAY = "apis/ray.io/v1"
_OWN = f"apis/{labels.API_VERSION}"


async def read_facts(cluster: Client, release: Release) -> ClusterFacts:
    """Read the cluster and the namespace of a client.

    Args:
        cluster: a client of the namespace of the release.
        release: the objects that the release's values name are read too.

    Raises:
        KubernetesError: the cluster does not answer, or not as a Kubernetes cluster does.
    """
    version = await cluster.version()
    editions = await cluster.openapi_editions()
    everywhere = cluster.in_all_namespaces()
    facts = ClusterFacts(
        url=cluster.url,
        version=version,
        apis=frozenset(editions),
        schemas=await _schemas(cluster, editions),
        namespace=cluster.namespace,
        namespaces=await _one(cluster, "Namespace", cluster.namespace),
        nodes=await _all(cluster, "Node"),
        storage_classes=await _all(cluster, "StorageClass"),
        operators=await _all(everywhere, "Deployment", KUBERAY_OPERATOR_LABEL),
        deployments=await _all(cluster, "Deployment"),
        pods=await _all(cluster, "Pod"),
        claims=await _all(cluster, "PersistentVolumeClaim"),
        queues=[],
        secrets=await _entries(cluster, "Secret", needs.secrets(release)),
        config_maps=await _entries(cluster, "ConfigMap", needs.config_maps(release)),
        denied=await _denied(cluster, release),
    )
    if QUEUES_API in facts.apis:
        facts = replace(facts, queues=await _all(cluster, "LocalQueue"))
    return facts


async def _schemas(cluster: Client, editions: Mapping[str, str]) -> Mapping[str, Schema]:
    wanted = {_KUBERAY: ("RayCluster",), _OWN: OWN_KINDS}
    found: dict[str, Schema] = {}
    for api, kinds in wanted.items():
        if api in editions:
            document = await cluster.openapi(editions[api])
            schemas = {kind: schema_of(document, kind) for kind in kinds}
            found |= {kind: each for kind, each in schemas.items() if each is not None}
    return found


async def _all(cluster: Client, kind: str, label_selector: str = "") -> Listed:
    try:
        return [each async for page in cluster.pages(kind, label_selector) for each in page.items]
    except Rejected as error:
        if error.status != _FORBIDDEN:
            raise
        return None


async def _one(cluster: Client, kind: str, name: str) -> Listed:
    try:
        found = await cluster.find(ObjectRef(kind, name))
    except Rejected as error:
        if error.status != _FORBIDDEN:
            raise
        return None
    return [] if found is None else [found]


async def _entries(
    cluster: Client, kind: str, wanted: Iterable[needs.Entries]
) -> Mapping[str, frozenset[str] | None]:
    found: dict[str, frozenset[str] | None] = {}
    for name in {each.name for each in wanted}:
        objects = await _one(cluster, kind, name)
        if objects is None:
            found[name] = None
        elif objects:
            [content] = objects
            found[name] = frozenset({**content.get("data", {}), **content.get("binaryData", {})})
    return found


async def _denied(cluster: Client, release: Release) -> frozenset[Right]:
    """Return the rights that the user lacks.

    A user who may escalate and bind roles needs none of the rights that the chart's roles grant.
    """
    needed = {*rights.created(release.values), *rights.ESCALATION, rights.DEFINITIONS}
    denied = await _denied_of(cluster, needed)
    if rights.ESCALATION & denied:
        denied |= await _denied_of(cluster, set(rights.granted(release.values)))
    return denied


async def _denied_of(cluster: Client, wanted: Iterable[Right]) -> frozenset[Right]:
    async def is_denied(right: Right) -> bool:
        answer = await cluster.create(right.review(cluster.namespace))
        return not answer["status"]["allowed"]

    ordered = list(wanted)
    answers = await asyncio.gather(*map(is_denied, ordered))
    return frozenset(right for right, denied in zip(ordered, answers, strict=True) if denied)
