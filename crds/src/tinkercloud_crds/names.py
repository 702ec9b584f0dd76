"""Names of the objects that belong to a session: the operator creates them, others look them up."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a session's children. Each suffix is unique, so no two names can collide."""

    session: str

    @property
    def ray_cluster(self) -> str:
        """RayCluster; KubeRay derives the names of its own children from it."""
        return self.session

    @property
    def head_service(self) -> str:
        """Service of the head."""
        return f"{self.session}-head"

    @property
    def ray_head_service(self) -> str:
        """KubeRay's own Service of the head, whose name resolves until the head's pod is gone."""
        return f"{self.ray_cluster}-head-svc"

    @property
    def engines(self) -> str:
        """Service of the sampler pods' engines."""
        return f"{self.session}-samplers"

    @property
    def head_config(self) -> str:
        """ConfigMap with the head's configuration."""
        return f"{self.session}-config"

    @property
    def token_secret(self) -> str:
        """Secret with the head's token."""
        return f"{self.session}-token"

    @property
    def program(self) -> str:
        """Job and NetworkPolicy of the session's program."""
        return f"{self.session}-program"

    def claim_template(self, device_class: str, count: int) -> str:
        """Return the name of the ResourceClaimTemplate for a number of devices of a class.

        A ResourceClaimTemplate cannot be changed, so each content has a name of its own.
        """
        content = f"{count} of {device_class}"
        return f"{self.session}-{hashlib.sha256(content.encode()).hexdigest()[:8]}-gpus"

    @property
    def network_policy(self) -> str:
        """NetworkPolicy of all pods."""
        return self.session

    @property
    def disruption_budget(self) -> str:
        """PodDisruptionBudget of all pods."""
        return self.session
