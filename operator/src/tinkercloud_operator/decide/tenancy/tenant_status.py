"""The status of a Tenant: what its owners' sessions use of its limits. Pure."""

from collections.abc import Sequence
from datetime import datetime

from tinkercloud_crds.conditions import ConditionStatus, ConditionType, Reason, moved
from tinkercloud_crds.quota_fields import Claimant, summary, usage
from tinkercloud_crds.tenant import TenantSpec, TenantStatus
from tinkercloud_kube.objects import Manifest


def tenant_status(
    manifest: Manifest, spec: TenantSpec, claimants: Sequence[Claimant], now: datetime
) -> TenantStatus:
    """Return the status of a Tenant.

    Args:
        manifest: the Tenant.
        spec: its specification.
        claimants: the sessions of its owners that have not ended.
        now: transition time of conditions that change.
    """
    previous = TenantStatus.model_validate(manifest.get("status", {}))
    generation = manifest["metadata"].get("generation", 0)
    used, limits = usage(claimants), spec.limits
    truth: ConditionStatus = "False" if used.waiting else "True"
    reason = Reason.QUOTA_EXCEEDED if used.waiting else Reason.READY
    message = (
        f"number of sessions that wait because of a limit: {used.waiting}" if used.waiting else ""
    )
    return TenantStatus(
        observed_generation=generation,
        conditions=[
            moved(
                previous.conditions,
                ConditionType.READY,
                truth,
                reason,
                message,
                generation=generation,
                now=now,
            )
        ],
        used=used,
        session_summary=summary(used.sessions, limits.sessions),
        gpu_summary=summary(used.dedicated_gpus, limits.dedicated_gpus),
        model_summary=summary(used.models, limits.models),
    )
