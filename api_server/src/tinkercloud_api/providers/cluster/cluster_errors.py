"""Errors of Kubernetes as clients of the API server see them."""

from tinkercloud_kube.errors import KubernetesError, Rejected
from tinkercloud_protocol.wire.errors import WireError


class ClusterRejected(WireError):
    """Kubernetes rejects a request for good; the message says what to change."""

    status = 503


class SessionRejected(ClusterRejected):
    """Kubernetes rejects what the client asked for; the message names the field."""

    status = 400
    category = "user"


def wire_error(error: KubernetesError) -> WireError:
    """Return the error that a client receives when Kubernetes does not do what it needs."""
    if not isinstance(error, Rejected):
        return ClusterRejected(str(error))
    if error.status in {400, 422}:
        return SessionRejected(f"Kubernetes rejected this session: {error.message}")
    return ClusterRejected(
        f"Kubernetes rejected {error.request} ({error.status}): {error.message}"
        f"{_remedy(error.message)}"
    )


def _remedy(message: str) -> str:
    """Return what to do about a rejection; messages of admission policies say so themselves."""
    if "exceeded quota" in message:
        return (
            "; end other sessions, or ask an administrator to raise the namespace's ResourceQuota"
        )
    if " cannot " in message:
        return "; bind the chart's Role to the API server's service account"
    return ""
