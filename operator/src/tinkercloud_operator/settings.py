"""The settings of the operator: environment variables `TINKERCLOUD_OPERATOR_*`.

Nested values are JSON (`TINKERCLOUD_OPERATOR_CLIENT_LABELS='[{"app": "x"}]'`). Unknown variables
are rejected, so that a misspelled setting cannot go unnoticed.
"""

import os
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX = "TINKERCLOUD_OPERATOR_"


class Settings(BaseSettings):
    """The operator's settings. Immutable."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_parse_none_str="null",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    namespace: str = "default"
    """The namespace that the operator watches."""
    identity: str = Field(default_factory=lambda: os.environ.get("HOSTNAME", "operator"))
    """Name of this replica in the Lease; defaults to the name of the pod."""
    lease_name: str = "tinkercloud-operator"
    """Lease that the leading replica holds."""
    lease_seconds: Annotated[int, Field(ge=3)] = 15
    """How long a Lease is valid without a renewal."""
    lease_renew_seconds: Annotated[int, Field(ge=2)] = 10
    """How long the leader retries a renewal of its Lease before it stops acting."""
    lease_retry_seconds: Annotated[int, Field(ge=1)] = 2
    """Pause between two attempts to acquire or renew the Lease."""
    probe_host: str = "0.0.0.0"  # noqa: S104 - the kubelet and Prometheus come from outside the pod
    """Address of /livez, /readyz and /metrics."""
    probe_port: Annotated[int, Field(ge=0, lt=65536)] = 9090
    """Port of /livez, /readyz and /metrics; 0 takes a free one."""
    checkpoint_root: str = "file:///checkpoints"
    """URL of the object store for checkpoints, as seen by heads: file:///..., s3://..., gs://...,
    az://..."""
    checkpoint_claim: str | None = None
    """PersistentVolumeClaim mounted at /checkpoints in every head, for file:///checkpoints."""
    checkpoint_secret: str | None = None
    """Secret whose entries become environment variables of every head and of the init containers
    that download models: the credentials of the store."""
    service_account: str = "default"
    """Service account of session pods; its token is not mounted."""
    pod_labels: dict[str, str] = {}
    """Additional labels of session pods. Labels of Tinkercloud and KubeRay take precedence."""
    image_pull_secrets: list[str] = []
    """Secrets for pulling session images."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Pull policy of session images; null uses the default of Kubernetes."""
    run_as_user: int | None = 65532
    """User id of session pods; null leaves it to the namespace (OpenShift)."""
    fs_group: int | None = 65532
    """Group id that owns the volumes of session pods; null leaves it to the namespace."""
    reserve_scratch: bool = False
    """Whether session pods request `ephemeral-storage` for their scratch space. Nodes and the
    ClusterQueues of Kueue must then provide it."""
    limit_cores: bool = False
    """Whether each container of a session is limited to the cores that it requests, as some
    ResourceQuotas require. Pods then have QoS class Guaranteed, but cannot use idle cores."""
    download_memory: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(M|Mi|G|Gi)$")] = "4Gi"
    """Memory of the init container that downloads a model."""
    ca_config_map: str | None = None
    """ConfigMap with the certificate authorities that session containers trust, instead of those of
    their images."""
    ca_key: str = "ca-bundle.crt"
    """Key of the PEM bundle in that ConfigMap."""
    client_labels: Annotated[
        list[Annotated[dict[str, str], Field(min_length=1)]], Field(min_length=1)
    ] = [{"app.kubernetes.io/part-of": "tinkercloud"}]
    """Labels of the pods that may connect to heads, one selector each: API server and operator."""
    network_policies: bool = True
    """Whether each session gets a NetworkPolicy."""
    outgoing_ports: list[Annotated[int, Field(gt=0, lt=65536)]] = [443]
    """Ports at which heads reach the checkpoint store and the model hub, at any address; empty if
    both are volumes."""
    ray_version: str = "2.60.0"
    """Version of Ray in the session images."""
    drain_seconds: Annotated[int, Field(ge=1)] = 20
    """How long a stopping head may take to finish its current operation."""
    suspend_seconds: Annotated[int, Field(ge=1)] = 120
    """How long a stopping head may then take to save its state before it is killed."""
    last_checkpoint_seconds: Annotated[int, Field(ge=0)] = 60
    """How long the deletion of a session waits for its last checkpoint."""
    judges_nodes: bool = True
    """Whether a session is reported as NeverFits if no node of the kind that its pods need is large
    enough. Disable it where autoscalers may add larger nodes; it is disabled automatically with
    Karpenter. Requires permission to list nodes, without which it has no effect."""
    leaves_cordoned_nodes: bool = True
    """Whether a session with pods on a cordoned node is suspended and resumed on other nodes, so
    that the node can be drained. Requires permission to list nodes, without which it has no
    effect."""
    kueue_groups: Annotated[int, Field(ge=3)] = 18
    """Pod groups that the cluster's Kueue accepts in one workload: 18 as of release 0.19, 8 in
    older ones. The head is one group, all trainers are one, and each engine is one."""
    starts_in_order: bool = True
    """Whether sessions that compete for GPUs or other devices start in order of creation, each once
    all pods of the earlier ones are scheduled. Otherwise two sessions could each get half of the
    GPUs and wait for the rest. Sessions with a queue or a custom scheduler are excluded."""
    resync_seconds: Annotated[int, Field(ge=5)] = 300
    """Interval at which all objects are listed and all sessions are reconciled."""
    max_concurrent: Annotated[int, Field(ge=1)] = 64
    """Number of sessions reconciled concurrently; most of the time is spent waiting for the API
    server."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of logged messages."""

    @property
    def stop_seconds(self) -> int:
        """Maximum time that a head takes to stop."""
        return self.drain_seconds + self.suspend_seconds


class UnknownSettingError(Exception):
    """A setting that does not exist; the message names it."""


def load_settings() -> Settings:
    """Read the settings from the environment.

    Raises:
        UnknownSettingError: there is an unknown TINKERCLOUD_OPERATOR_ variable.
        pydantic.ValidationError: a value is invalid; the message names its field.
        pydantic_settings.SettingsError: a list or an object is not valid JSON.
    """
    known = {f"{ENV_PREFIX}{name}".upper() for name in Settings.model_fields}
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name.upper().split("__")[0] not in known:
            raise UnknownSettingError(
                f"environment variable {name} is not a setting of the operator; the settings are"
                " listed in docs/operate/configuration.md"
            )
    return Settings()
