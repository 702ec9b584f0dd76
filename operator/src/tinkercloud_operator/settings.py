"""The settings of the operator: environment variables `TINKERCLOUD_OPERATOR_*`.

Nested values are JSON (`TINKERCLOUD_OPERATOR_CLIENT_LABELS='[{"app": "x"}]'`). Unknown variables
are rejected, so that a misspelled setting cannot go unnoticed.
"""

import os
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from tinkercloud_crds.pods.shapes import HeadShape
from tinkercloud_protocol.heads.launch import OtlpEndpoint

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
    """Namespace that the operator watches."""
    identity: str = Field(default_factory=lambda: os.environ.get("HOSTNAME", "operator"))
    """Name of this replica in the Lease; defaults to the name of the pod."""
    lease_name: str = "tinkercloud-operator"
    """Name of the Lease for leader election."""
    lease_seconds: Annotated[int, Field(ge=3)] = 15
    """How long, in seconds, the Lease is valid without renewal."""
    lease_renew_seconds: Annotated[int, Field(ge=2)] = 10
    """How long, in seconds, the leader tries to renew the Lease before it stops acting as the
    leader."""
    lease_retry_seconds: Annotated[int, Field(ge=1)] = 2
    """Interval, in seconds, between attempts to acquire or renew the Lease."""
    probe_host: str = "0.0.0.0"  # noqa: S104 - the kubelet and Prometheus come from outside the pod
    """Address on which the operator serves /livez, /readyz and /metrics."""
    probe_port: Annotated[int, Field(ge=0, lt=65536)] = 9090
    """Port on which the operator serves /livez, /readyz and /metrics; 0 selects a free port."""
    checkpoint_root: str = "file:///checkpoints"
    """URL of the checkpoint store, as heads access it: file:///..., s3://..., gs://... or
    az://...."""
    checkpoint_claim: str | None = None
    """PersistentVolumeClaim to mount at /checkpoints in every head. Required for
    file:///checkpoints."""
    checkpoint_secret: str | None = None
    """Secret with the credentials of the checkpoint store. Its entries become environment variables
    of all heads and of the init containers that download models."""
    service_account: str = "default"
    """Service account of session pods. Its token is not mounted."""
    pod_labels: dict[str, str] = {}
    """Additional labels of session pods. Labels of Tinkercloud and KubeRay take precedence."""
    image_pull_secrets: list[str] = []
    """Names of image pull secrets for session pods."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Image pull policy of session pods. Null uses the default of Kubernetes."""
    run_as_user: int | None = 65532
    """User ID of session pods. Null leaves the field unset, as OpenShift requires."""
    fs_group: int | None = 65532
    """Group ID that owns the volumes of session pods. Null leaves the field unset."""
    reserve_scratch: bool = False
    """Whether session pods request `ephemeral-storage` for their scratch volume. Nodes, and
    ClusterQueues if you use Kueue, must then provide that resource."""
    limit_cores: bool = False
    """Whether to set a CPU limit equal to the CPU request for each session container, as some
    ResourceQuotas require. Pods then have QoS class Guaranteed but cannot use idle cores."""
    download_memory: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(M|Mi|G|Gi)$")] = "4Gi"
    """Memory of the init container that downloads a model."""
    ca_config_map: str | None = None
    """ConfigMap with CA certificates for session containers. They replace the CA certificates of
    the images."""
    ca_key: str = "ca-bundle.crt"
    """Key of the bundle (PEM) in the ConfigMap."""
    client_labels: Annotated[
        list[Annotated[dict[str, str], Field(min_length=1)]], Field(min_length=1)
    ] = [{"app.kubernetes.io/part-of": "tinkercloud"}]
    """Label selectors of the pods that may connect to heads, such as the API server and the
    operator."""
    api_url: str | None = None
    """URL of the API server inside the cluster, which programs (`spec.program`) use. If null,
    sessions with programs are rejected."""
    api_labels: Annotated[dict[str, str], Field(min_length=1)] = {
        "app.kubernetes.io/part-of": "tinkercloud",
        "app.kubernetes.io/component": "api",
    }
    """Labels of the API server's pods, the only pods to which programs may connect."""
    api_port: Annotated[int, Field(gt=0, lt=65536)] = 8000
    """Port of the API server's pods."""
    network_policies: bool = True
    """Whether to create a NetworkPolicy for each session and for each program."""
    outgoing_ports: list[Annotated[int, Field(gt=0, lt=65536)]] = [443]
    """Ports on which heads may connect to the checkpoint store and the model hub, at any address.
    Empty if both are volumes."""
    otlp_endpoint: OtlpEndpoint | None = None
    """Address of an OpenTelemetry collector, such as `http://collector:4318`, to which heads send
    spans of requests (OTLP over HTTP). Its port must be one of `outgoing_ports`. Null: they send
    none."""
    ray_version: str = "2.60.0"
    """Ray version in the images of session pods."""
    drain_seconds: Annotated[int, Field(ge=1)] = 20
    """How long, in seconds, a stopping head may take to finish its current operation."""
    suspend_seconds: Annotated[int, Field(ge=1)] = 120
    """How long, in seconds, a stopping head may then take to save its state before it is killed.
    BaseModels may set another time (`head.suspendSeconds`)."""
    last_checkpoint_seconds: Annotated[int, Field(ge=0)] = 60
    """How long, in seconds, the deletion of a session waits for its final checkpoint. If its
    BaseModel sets `head.suspendSeconds` or is planned, that time applies if it is longer."""
    judges_nodes: bool = True
    """Whether to report a session as NeverFits if all nodes that match its pods are too small.
    Disable it if an autoscaler may add larger nodes; it is disabled automatically on clusters with
    Karpenter. Has no effect without permission to list nodes."""
    kueue_groups: Annotated[int, Field(ge=3)] = 18
    """Maximum number of pod groups per Kueue workload: 18 as of Kueue 0.19, 8 in older releases.
    The head is one group, all trainers together are one group, and each engine is one group."""
    starts_in_order: bool = True
    """Whether sessions that compete for GPUs or other devices start in order of creation. Each
    session waits until all pods of older sessions are scheduled. Otherwise, two sessions could each
    get half of the GPUs and wait for the other half forever. Does not apply to sessions that use a
    queue or a custom scheduler."""
    resync_seconds: Annotated[int, Field(ge=5)] = 300
    """Interval, in seconds, at which the operator lists all objects and reconciles all sessions."""
    max_concurrent: Annotated[int, Field(ge=1)] = 64
    """Maximum number of sessions that are reconciled concurrently. Reconciling mostly waits for the
    Kubernetes API server."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of log messages."""

    def suspend_seconds_of(self, head: HeadShape | None) -> int:
        """Return how long a head may take to save its state; None for one of unknown shape."""
        own = head.suspend_seconds if head is not None else None
        return self.suspend_seconds if own is None else own

    def stop_seconds_of(self, head: HeadShape | None) -> int:
        """Return the maximum time that a head takes to stop."""
        return self.drain_seconds + self.suspend_seconds_of(head)

    def last_checkpoint_seconds_of(self, head: HeadShape | None) -> int:
        """Return how long the deletion of a session waits for its last checkpoint."""
        own = head.suspend_seconds if head is not None else None
        return max(self.last_checkpoint_seconds, own or 0)


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
