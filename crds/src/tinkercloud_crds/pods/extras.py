"""Extended resources and network variables of worker pods, so that their ranks use fast networks.

The author of a BaseModel sets both; a session cannot.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from tinkercloud_crds.structural import Part, rules

_HUGE_PAGES = r"hugepages-([1-9][0-9]{0,3})([KMG]i)"
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_QUALIFIED = rf"{_LABEL}(\.{_LABEL})*/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"


class ExtendedResource(Part):
    """A countable resource of nodes: devices of a device plugin, or huge pages."""

    name: Annotated[str, Field(max_length=240, pattern=rf"^({_HUGE_PAGES}|{_QUALIFIED})$")]
    """Name of the resource in the form `domain/name`, such as `rdma/hca_shared_devices_a` or
    `vpc.amazonaws.com/efa`; for huge pages, `hugepages-` and the page size, such as
    `hugepages-2Mi`."""
    count: Annotated[int, Field(ge=1, le=1 << 20)]
    """Amount per container, used as both request and limit. For huge pages, the number of pages."""

    @property
    def amount(self) -> str:
        """The quantity in Kubernetes notation: a count, or bytes for huge pages."""
        pages = re.fullmatch(_HUGE_PAGES, self.name)
        return f"{self.count * int(pages[1])}{pages[2]}" if pages is not None else str(self.count)


class Variable(Part):
    """An environment variable of a communication library.

    Only variables of these libraries are accepted: the operator configures Ray and Python, and
    credentials belong in Secrets. A value contains no `$`, because Kubernetes would expand
    `$(NAME)` to other variables, such as Ray's token.
    """

    name: Annotated[
        str,
        Field(
            max_length=128,
            pattern="^(NCCL|TORCH_NCCL|OFI_NCCL|GLOO|UCX|FI|RDMAV)_[A-Z0-9_]+$",
        ),
    ]
    """Name of a variable of NCCL (`NCCL_`, `TORCH_NCCL_`, and `OFI_NCCL_` for its libfabric
    plugin), gloo (`GLOO_`), UCX (`UCX_`), libfabric (`FI_`) or verbs (`RDMAV_`)."""
    value: Annotated[str, Field(max_length=1024, pattern="^[ -#%-~]*$")]
    """Value of the variable: printable ASCII without `$`."""


def _keyed_by_name(*pairs: tuple[str, str]) -> dict[str, Any]:
    """Return the schema extension of a list whose entries are keyed by name."""
    keyed = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
    return keyed | (rules(*pairs) if pairs else {})


ExtendedResources = Annotated[
    tuple[ExtendedResource, ...],
    Field(
        max_length=8,
        json_schema_extra=_keyed_by_name(
            (
                "self.all(item, !item.name.contains('kubernetes.io/')"
                " && !item.name.startsWith('requests.'))",
                "name: names that contain kubernetes.io/ or start with requests. are reserved for"
                " Kubernetes; use a resource of a device plugin",
            ),
            (
                "self.all(item, !item.name.endsWith('gpu')"
                " && !item.name.startsWith('nvidia.com/gpu')"
                " && !item.name.startsWith('nvidia.com/mig-'))",
                "name: must not be a GPU resource; set gpusPerReplica to request GPUs",
            ),
        ),
    ),
]
"""Extended resources of one container, with unique names."""
Environment = Annotated[
    tuple[Variable, ...], Field(max_length=32, json_schema_extra=_keyed_by_name())
]
"""Environment variables of one container, with unique names."""
FOR_PODS = (
    "self.replicas >= 1 || self.extendedResources.size() + self.environment.size() == 0",
    "extendedResources, environment: only valid with worker pods; remove both, or set replicas",
)
"""Rule of a shape that has both fields."""


def total(containers: Iterable[tuple[ExtendedResource, ...]]) -> tuple[ExtendedResource, ...]:
    """Return the sum of the extended resources of a pod's containers."""
    counts: Counter[str] = Counter()
    for resources in containers:
        counts.update({resource.name: resource.count for resource in resources})
    # Not validated: the sum may exceed the maximum of one container.
    return tuple(
        ExtendedResource.model_construct(name=name, count=count) for name, count in counts.items()
    )
