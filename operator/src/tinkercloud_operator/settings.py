"""All settings of the operator, in one place: environment variables `TINKERCLOUD_OPERATOR_*`.

Nested values are JSON (`TINKERCLOUD_OPERATOR_CLIENT_LABELS='[{"app": "x"}]'`). A variable nobody
knows is refused: a setting that does nothing must not pass for one that works.
"""

import os
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX = "TINKERCLOUD_OPERATOR_"


class Settings(BaseSettings):
    """What the chart may decide. Immutable once read."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_parse_none_str="null",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    namespace: str = "default"
    """The one namespace that is watched."""
    identity: str = Field(default_factory=lambda: os.environ.get("HOSTNAME", "operator"))
    """This replica's name in the Lease: the pod's."""
    lease_name: str = "tinkercloud-operator"
    """Lease that the leading replica holds."""
    lease_seconds: Annotated[int, Field(ge=3)] = 15
    """How long a leader that says nothing stays the leader."""
    lease_renew_seconds: Annotated[int, Field(ge=2)] = 10
    """How long the leader tries to renew its Lease before it stops acting."""
    lease_retry_seconds: Annotated[int, Field(ge=1)] = 2
    """Pause between two tries."""
    probe_host: str = "0.0.0.0"  # noqa: S104 - the kubelet and Prometheus come from outside the pod
    """Address of /livez, /readyz and /metrics."""
    probe_port: Annotated[int, Field(ge=0, lt=65536)] = 9090
    """Port of /livez, /readyz and /metrics; 0 takes a free one."""
    checkpoint_root: str = "file:///checkpoints"
    """URL of the object store for checkpoints, as heads see it: file:///..., s3://..., gs://...,
    az://..."""
    checkpoint_claim: str | None = None
    """PersistentVolumeClaim mounted at /checkpoints in every head, for file:///checkpoints."""
    checkpoint_secret: str | None = None
    """Secret whose entries become environment variables of every head, and of what downloads models
    beforehand: the store's credentials."""
    service_account: str = "default"
    """Service account of session pods; its token is not mounted."""
    pod_labels: dict[str, str] = {}
    """Labels of session pods, beside our own and KubeRay's, which stay as they are."""
    image_pull_secrets: list[str] = []
    """Secrets to pull session images with."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When session images are pulled; null leaves it to Kubernetes."""
    run_as_user: int | None = 65532
    """User of session pods; null leaves it to the namespace (OpenShift)."""
    fs_group: int | None = 65532
    """Group that owns the volumes of session pods; null leaves it to the namespace."""
    reserve_scratch: bool = False
    """Whether a session pod asks its node for what it may write to scratch space, as
    `ephemeral-storage`. Nodes must have that to give, and so must Kueue's ClusterQueues."""
    limit_cores: bool = False
    """Whether each container of a session is limited to the cores that it requests. ResourceQuotas
    may ask for it, and pods are of QoS class Guaranteed with it; idle cores are not used then."""
    download_memory: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(M|Mi|G|Gi)$")] = "4Gi"
    """Memory of the container that downloads a model before a pod's others start."""
    ca_config_map: str | None = None
    """ConfigMap with the certificate authorities that containers of sessions trust, instead of
    their images' own."""
    ca_key: str = "ca-bundle.crt"
    """Entry of that ConfigMap, in PEM."""
    client_labels: Annotated[
        list[Annotated[dict[str, str], Field(min_length=1)]], Field(min_length=1)
    ] = [{"app.kubernetes.io/part-of": "tinkercloud"}]
    """Labels of the pods that may reach heads, one selector each: API server and operator."""
    network_policies: bool = True
    """Whether each session gets a NetworkPolicy."""
    outgoing_ports: list[Annotated[int, Field(gt=0, lt=65536)]] = [443]
    """Ports at which heads reach the checkpoint store and the model hub, wherever those are; none
    where both are volumes."""
    ray_version: str = "2.60.0"
    """Ray in the session images."""
    drain_seconds: Annotated[int, Field(ge=1)] = 20
    """How long a head that is told to stop may finish what it runs."""
    suspend_seconds: Annotated[int, Field(ge=1)] = 120
    """How long it may then take to save its state, before it is killed."""
    last_checkpoint_seconds: Annotated[int, Field(ge=0)] = 60
    """How long the deletion of a session waits for its last checkpoint."""
    judges_nodes: bool = True
    """Whether a pod is said never to fit if all nodes of the kind it wants are too small. Switch it
    off where larger ones are made on demand; where Karpenter makes nodes it is off. It needs the
    right to list nodes, without which it does nothing."""
    leaves_cordoned_nodes: bool = True
    """Whether a session that has pods on a cordoned node is suspended and started again on others,
    so that the node can be drained. It needs the right to list nodes, without which it does
    nothing."""
    kueue_groups: Annotated[int, Field(ge=3)] = 18
    """Groups of pods that the cluster's Kueue takes in one workload: 18 as of release 0.19, 8 in
    older ones. Head and trainers are a group each, and so is every engine."""
    starts_in_order: bool = True
    """Whether sessions that compete for GPUs, or for other devices, get their pods in order of
    arrival, each once all pods of those before it have nodes: otherwise two could get half of the
    GPUs each and wait for the rest. Sessions with a queue or a scheduler of their own are left to
    those."""
    resync_seconds: Annotated[int, Field(ge=5)] = 300
    """Everything is listed, and every session looked at, again after this long, whether anything
    happened or not."""
    max_concurrent: Annotated[int, Field(ge=1)] = 64
    """Sessions looked at at the same time; most of it is waiting for the API server."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages to log."""

    @property
    def stop_seconds(self) -> int:
        """How long a head takes to stop, at most."""
        return self.drain_seconds + self.suspend_seconds


class UnknownSettingError(Exception):
    """A setting that does not exist; the message names it."""


def load_settings() -> Settings:
    """Read the settings from the environment.

    Raises:
        UnknownSettingError: the environment holds a TINKERCLOUD_OPERATOR_ variable nobody reads.
        pydantic.ValidationError: a value is not acceptable; the message names its field.
        pydantic_settings.SettingsError: a list or a table is not JSON.
    """
    known = {f"{ENV_PREFIX}{name}".upper() for name in Settings.model_fields}
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name.upper().split("__")[0] not in known:
            raise UnknownSettingError(
                f"environment variable {name} is not a setting of the operator; the settings are"
                " listed in docs/operate/configuration.md"
            )
    return Settings()
