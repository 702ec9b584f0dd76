"""All checks of a cluster, in the order of an installation: pure."""

from collections.abc import Sequence

from tinkercloud_api.cluster_check import installation, platform
from tinkercloud_api.cluster_check.findings import ClusterFacts, Finding, Level
from tinkercloud_api.cluster_check.values import Release


def examine(facts: ClusterFacts, release: Release, version: str) -> Sequence[Finding]:
    """Return the result of every check.

    Args:
        facts: what was read of the cluster.
        release: what the release will be configured with.
        version: version of this command; its charts are meant.
    """
    return [
        Finding("cluster", Level.OK, f"{facts.url}, namespace {facts.namespace}"),
        *platform.check_kubernetes(facts),
        *platform.check_definitions(facts, version),
        *platform.check_kuberay(facts, release),
        *platform.check_kueue(facts, release),
        *platform.check_nodes(facts, release),
        *platform.check_gpus(facts, release),
        *installation.check_values(release, version),
        *installation.check_namespace(facts, release),
        *installation.check_permissions(facts, release),
        *installation.check_storage(facts, release),
        *installation.check_secrets(facts, release),
        *installation.check_images(facts, release),
        *installation.check_service(facts, version),
    ]
