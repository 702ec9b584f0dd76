"""What may be said of extended resources and variables, before any API server is asked."""

from typing import Any

import pytest
from pydantic import ValidationError

from tinkercloud_crds.pods.extras import ExtendedResource, Variable
from tinkercloud_crds.pods.shapes import SamplerShape, TrainerShape
from tinkercloud_crds.training_session import SamplerOverride, TrainerOverride

LONGEST_NAME = "n" * 63


@pytest.mark.parametrize(
    ("name", "amount"),
    [
        ("rdma/hca_shared_devices_a", "3"),
        ("vpc.amazonaws.com/efa", "3"),
        (f"example.org/{LONGEST_NAME}", "3"),
        ("hugepages-2Mi", "6Mi"),
        ("hugepages-64Ki", "192Ki"),
        ("hugepages-1Gi", "3Gi"),
    ],
)
def test_a_resource_is_a_count_and_huge_pages_are_bytes(name: str, amount: str) -> None:
    assert ExtendedResource(name=name, count=3).amount == amount


@pytest.mark.parametrize(
    "name",
    [
        *("cpu", "memory", "ephemeral-storage", "pods", "efa"),
        *(
            "/efa",
            "rdma/",
            "a/b/c",
            "Example.org/nic",
            "example..org/nic",
            "rdma/-nic",
            "rdma/nic ",
        ),
        f"example.org/{LONGEST_NAME}n",
        *("hugepages-", "hugepages-2", "hugepages-0Mi", "hugepages-2MiB"),
    ],
)
def test_a_resource_without_a_domain_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        ExtendedResource(name=name, count=1)


@pytest.mark.parametrize("count", [0, -1, 1.5, "500m"])
def test_resources_come_whole_and_at_least_one(count: Any) -> None:
    with pytest.raises(ValidationError, match="count"):
        ExtendedResource(name="rdma/hca", count=count)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker"),
        ("NCCL_DEBUG_FILE", "/tmp/nccl.%h.%p"),  # noqa: S108 - a pod's own
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
        ("OFI_NCCL_PROTOCOL", "RDMA"),
        ("GLOO_SOCKET_IFNAME", "eth0"),
        ("UCX_TLS", "rc,cuda"),
        ("FI_PROVIDER", "efa"),
        ("RDMAV_FORK_SAFE", ""),
    ],
)
def test_variables_of_communication_libraries_are_accepted(name: str, value: str) -> None:
    assert Variable(name=name, value=value).value == value


@pytest.mark.parametrize(
    "name",
    [
        *("TINKERCLOUD_TRAINER__DEVICE", "RAY_AUTH_TOKEN", "RAY_ADDRESS", "FQ_RAY_IP"),
        *("PYTHONPATH", "PATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "HOME", "OMP_NUM_THREADS"),
        *("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SGLANG_API_KEY", "CUDA_VISIBLE_DEVICES"),
        *("TORCH_LOGS", "MASTER_ADDR", "NCCL", "NCCL_", "nccl_debug", "NCCL_DEBUG\n", "MY_NCCL_X"),
    ],
)
def test_no_other_variable_may_be_set(name: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        Variable(name=name, value="1")


@pytest.mark.parametrize(
    "value", ["$(RAY_AUTH_TOKEN)", "a$", "a\nb", "a\0", "\N{LATIN SMALL LETTER E WITH ACUTE}"]
)
def test_a_value_stands_for_itself(value: str) -> None:
    # Kubernetes would put a variable that the container has in the place of its name.
    with pytest.raises(ValidationError, match="value"):
        Variable(name="NCCL_DEBUG_FILE", value=value)


def test_a_value_is_all_there_is_to_a_variable() -> None:
    assert Variable.model_fields.keys() == {"name", "value"}


@pytest.mark.parametrize("override", [TrainerOverride, SamplerOverride])
@pytest.mark.parametrize("shape", [TrainerShape, SamplerShape])
def test_only_a_base_model_has_a_say(
    override: type[TrainerOverride | SamplerOverride], shape: type[TrainerShape | SamplerShape]
) -> None:
    fields = {"extended_resources", "environment"}

    assert fields <= shape.model_fields.keys()
    assert not fields & override.model_fields.keys()
