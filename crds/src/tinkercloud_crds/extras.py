"""What worker pods may have besides cores, memory and GPUs, so that their ranks use fast networks.

A BaseModel's author decides on both: a session can't.
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
    """Something that nodes count: devices that a plugin offers, or huge pages."""

    name: Annotated[str, Field(max_length=240, pattern=rf"^({_HUGE_PAGES}|{_QUALIFIED})$")]
    """`domain/name`, such as `rdma/hca_shared_devices_a` or `vpc.amazonaws.com/efa`; or huge pages
    by their size, such as `hugepages-2Mi`."""
    count: Annotated[int, Field(ge=1, le=1 << 20)]
    """How many each container has, requested and limited alike; of huge pages, pages."""

    @property
    def amount(self) -> str:
        """What Kubernetes is told: a number, or the bytes of huge pages."""
        pages = re.fullmatch(_HUGE_PAGES, self.name)
        return f"{self.count * int(pages[1])}{pages[2]}" if pages is not None else str(self.count)


class Variable(Part):
    """A variable of the libraries that ranks speak through.

    Of no other programs: what the operator, Ray and Python are told is not a BaseModel's, and
    credentials are in Secrets. A value has no `$`, since Kubernetes would put variables in the
    place of `$(NAME)`, such as Ray's token.
    """

    name: Annotated[
        str,
        Field(
            max_length=128,
            pattern="^(NCCL|TORCH_NCCL|OFI_NCCL|GLOO|UCX|FI|RDMAV)_[A-Z0-9_]+$",
        ),
    ]
    """Of NCCL (`NCCL_`, `TORCH_NCCL_`, and its plugin for libfabric, `OFI_NCCL_`), gloo (`GLOO_`),
    UCX (`UCX_`), libfabric (`FI_`) or verbs (`RDMAV_`)."""
    value: Annotated[str, Field(max_length=1024, pattern="^[ -#%-~]*$")]
    """Printable ASCII, but no `$`."""


def _keyed_by_name(*pairs: tuple[str, str]) -> dict[str, Any]:
    """Return what a list's schema says besides, of which each entry has a name of its own."""
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
                "name: kubernetes.io/ and requests. are Kubernetes' own; name what a plugin of the"
                " nodes offers",
            ),
            (
                "self.all(item, !item.name.endsWith('gpu')"
                " && !item.name.startsWith('nvidia.com/gpu')"
                " && !item.name.startsWith('nvidia.com/mig-'))",
                "name: GPUs are asked for with gpusPerReplica; name something else",
            ),
        ),
    ),
]
"""Resources of one container, each name once."""
Environment = Annotated[
    tuple[Variable, ...], Field(max_length=32, json_schema_extra=_keyed_by_name())
]
"""Variables of one container, each name once."""
FOR_PODS = (
    "self.replicas >= 1 || self.extendedResources.size() + self.environment.size() == 0",
    "extendedResources, environment: are for worker pods; leave both out, or set replicas",
)
"""Rule of a shape that has both."""


def total(containers: Iterable[tuple[ExtendedResource, ...]]) -> tuple[ExtendedResource, ...]:
    """Return what the containers of a pod ask for together."""
    counts: Counter[str] = Counter()
    for resources in containers:
        counts.update({resource.name: resource.count for resource in resources})
    # Unchecked: together they may be more than one may ask for.
    return tuple(
        ExtendedResource.model_construct(name=name, count=count) for name, count in counts.items()
    )
