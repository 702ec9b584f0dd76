"""Extra resources and environment of worker pods: cases for each rule."""

from typing import Any

from tinkercloud_testing.resource_rules.rule import Rule, base_model
from tinkercloud_testing.resources.sessions import ENGINES, EXTERNAL, TRAINERS, Json

RDMA = "rdma/hca_shared_devices_a"
VARIABLES: list[Json] = [{"name": "NCCL_IB_HCA", "value": "=mlx5_0:1"}]


def with_resources(kind: str, *names: str) -> Json:
    """Return a BaseModel whose trainers or samplers request one of each."""
    resources = [{"name": name, "count": 1} for name in names]
    return _with(kind, extendedResources=resources)


def with_variables(kind: str, **values: str) -> Json:
    """Return a BaseModel whose trainers or samplers have environment variables."""
    pairs = [{"name": name, "value": value} for name, value in values.items()]
    return _with(kind, environment=pairs)


def _with(kind: str, **fields: Any) -> Json:
    shapes: Json = {"trainer": TRAINERS, "sampler": ENGINES}
    return base_model(**shapes | {kind: {**shapes[kind], **fields}})


def _of_lists(kind: str) -> tuple[Rule, ...]:
    path = f"spec.{kind}.extendedResources"
    return (
        Rule(
            path,
            "name: names that contain kubernetes.io/ or start with requests. are reserved for"
            " Kubernetes; use a resource of a device plugin",
            {
                "RDMA": with_resources(kind, RDMA),
                "EFA and huge pages": with_resources(
                    kind, "vpc.amazonaws.com/efa", "hugepages-2Mi"
                ),
                "a name like theirs": with_resources(kind, "kubernetes.io.example.org/nic"),
            },
            {
                "theirs": with_resources(kind, "kubernetes.io/nic"),
                "theirs below": with_resources(kind, "node.kubernetes.io/nic"),
                "the second": with_resources(kind, RDMA, "example.kubernetes.io/nic"),
                "a quota's": with_resources(kind, "requests.example.org/nic"),
            },
        ),
        Rule(
            path,
            "name: must not be a GPU resource; set gpusPerReplica to request GPUs",
            {
                "RDMA": with_resources(kind, RDMA),
                "a NIC of the same maker": with_resources(kind, "nvidia.com/mlnxnics"),
                "gpu in the domain": with_resources(kind, "gpu.example.org/nic"),
            },
            {
                "GPUs": with_resources(kind, "nvidia.com/gpu"),
                "GPUs of another maker": with_resources(kind, RDMA, "amd.com/gpu"),
                "shared ones": with_resources(kind, "nvidia.com/gpu.shared"),
                "parts of them": with_resources(kind, "nvidia.com/mig-1g.10gb"),
            },
        ),
    )


def _of_shapes(kind: str, without_pods: Json) -> Rule:
    resources = [{"name": RDMA, "count": 1}]

    def with_fields(**fields: Any) -> Json:
        shapes: Json = {"trainer": TRAINERS, kind: {**without_pods, **fields}}
        return base_model(**shapes)

    return Rule(
        f"spec.{kind}",
        "extendedResources, environment: only valid with worker pods; remove both, or set replicas",
        {
            "resources of pods": with_resources(kind, RDMA),
            "variables of pods": with_variables(kind, NCCL_DEBUG="INFO", UCX_TLS="rc"),
            "neither": with_fields(extendedResources=[], environment=[]),
        },
        {
            "resources of none": with_fields(extendedResources=resources),
            "variables of none": with_fields(environment=VARIABLES),
            "both": with_fields(extendedResources=resources, environment=VARIABLES),
        },
    )


EXTRAS_RULES = (
    *_of_lists("trainer"),
    *_of_lists("sampler"),
    _of_shapes("trainer", {}),
    _of_shapes("sampler", EXTERNAL),
)
