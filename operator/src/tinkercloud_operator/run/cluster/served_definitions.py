"""The CRDs that the API server serves, read at the start of a term and when they change.

Every account may read them (`system:discovery`). If that permission was removed, the operator
learns of missing fields only from rejected writes.
"""

from collections.abc import Mapping

import structlog

from tinkercloud_crds import labels
from tinkercloud_crds.served_schemas import (
    Schema,
    declared,
    kuberay_gap,
    own_gap,
    schema_of,
)
from tinkercloud_kube.client import Client
from tinkercloud_kube.errors import NotFound, Rejected
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator import metrics

log = structlog.get_logger(__name__)

REQUIRED_KINDS = ("BaseModel", "TrainingSession")
"""Our own kinds without which the operator can't work."""
OWN_KINDS = (*REQUIRED_KINDS, "Tenant")
"""Our own kinds whose CRDs are compared with what the operator needs."""
_KUBERAY = "apis/ray.io/v1"
_OWN = f"apis/{labels.API_VERSION}"


class ServedDefinitions:
    """The served CRDs, compared with what the operator needs. Belongs to one event loop."""

    def __init__(self, cluster: Client) -> None:
        self.kuberay_gap: str | None = None
        """What the RayCluster CRD lacks, its version and the required one."""
        self.own_gaps: Mapping[str, str] = {}
        """By kind: what our own CRDs lack."""
        self._cluster = cluster
        self._schemas: dict[str, Schema] = {}
        """Schemas of our own kinds."""
        self._known: dict[str, str] = {}
        """By API: the version of its OpenAPI document that was read."""

    async def refresh(self) -> bool:
        """Read the CRDs that have changed; return whether a gap appeared or disappeared.

        Raises:
            KubernetesError: they could not be read; the previous ones are kept.
        """
        before = (self.kuberay_gap, self.own_gaps)
        try:
            editions = await self._cluster.openapi_editions()
            for api in (_KUBERAY, _OWN):
                if self._known.get(api) != editions.get(api, ""):
                    await self._read(api, editions.get(api, ""))
        except (NotFound, Rejected) as error:
            log.info("not permitted to read the served CRDs", error=str(error))
        for kind in OWN_KINDS:
            metrics.DEFINITIONS_OUTDATED.labels(kind).set(kind in self.own_gaps)
        metrics.DEFINITIONS_OUTDATED.labels("RayCluster").set(self.kuberay_gap is not None)
        if before == (self.kuberay_gap, self.own_gaps):
            return False
        for gap in filter(None, (self.kuberay_gap, *self.own_gaps.values())):
            log.error("a served CRD is outdated", problem=gap)
        return True

    async def _read(self, api: str, edition: str) -> None:
        document = await self._cluster.openapi(edition) if edition else {}
        if api == _KUBERAY:
            schema = schema_of(document, "RayCluster")
            self.kuberay_gap = None if schema is None else kuberay_gap(schema)
        else:
            found = {kind: schema_of(document, kind) for kind in OWN_KINDS}
            self._schemas = {kind: each for kind, each in found.items() if each is not None}
            gaps = {kind: own_gap(kind, each) for kind, each in self._schemas.items()}
            self.own_gaps = {kind: gap for kind, gap in gaps.items() if gap is not None}
        self._known[api] = edition

    def storable(self, kind: str, status: Manifest) -> Manifest:
        """Return a status without the fields that the served CRD cannot store."""
        return declared(status, self._schemas.get(kind))
