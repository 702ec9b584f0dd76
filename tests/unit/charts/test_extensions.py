"""What a platform adds to the chart's pods, and what the chart adds to the cluster's own roles."""

from functools import cache
from typing import Any

import pytest
import yaml

from tinkercloud_testing.resources.charts import (
    CHART,
    CRD_CHART,
    environment,
    helm,
    objects,
    of_kind,
    one,
)

API, OPERATOR = "tinker-tinkercloud-api", "tinker-tinkercloud-operator"
PRODUCTION = ("--values", str(CHART / "ci" / "production.yaml"))
HOOKS = {
    "tinker-tinkercloud-delete-sessions": ("Job", "pre-delete"),
    "tinker-tinkercloud-test": ("Pod", "test"),
}


@cache
def roles() -> dict[str, dict[str, Any]]:
    found = yaml.safe_load_all(helm("template", "crds", str(CRD_CHART)))
    return {
        each["metadata"]["name"]: each for each in found if each and each["kind"] == "ClusterRole"
    }


def may(verb: str, resource: str, cluster_role: str) -> bool:
    """Whether a role of the cluster's own, which gathers others by their labels, allows that."""
    label = f"rbac.authorization.k8s.io/aggregate-to-{cluster_role}"
    rules = [
        rule
        for role in roles().values()
        if role["metadata"]["labels"].get(label) == "true"
        for rule in role["rules"]
    ]
    return any(verb in rule["verbs"] and resource in rule["resources"] for rule in rules)


@pytest.mark.parametrize(
    ("role", "sees", "runs", "offers"),
    [("view", True, False, False), ("edit", True, True, False), ("admin", True, True, True)],
)
def test_the_clusters_own_roles_extend_to_our_resources(
    role: str, sees: bool, runs: bool, offers: bool
) -> None:
    for verb in ("get", "list", "watch"):
        assert may(verb, "trainingsessions", role) is sees
        assert may(verb, "basemodels", role) is sees
    for verb in ("create", "update", "patch", "delete", "deletecollection"):
        assert may(verb, "trainingsessions", role) is runs
        assert may(verb, "basemodels", role) is offers


def test_nobody_is_given_a_status_to_write() -> None:
    resources = {
        each for role in roles().values() for rule in role["rules"] for each in rule["resources"]
    }

    assert resources == {"basemodels", "trainingsessions", "tenants"}


def test_deleting_everything_of_a_namespace_leaves_models_and_sessions() -> None:
    found = yaml.safe_load_all(helm("template", "crds", str(CRD_CHART)))
    categories = [
        each["spec"]["names"]["categories"]
        for each in found
        if each and each["kind"] == "CustomResourceDefinition"
    ]

    assert categories == [["ml"], ["ml"], ["ml"]]


def test_pods_are_spread_among_their_own_kind() -> None:
    (found,) = one("Deployment", API, *PRODUCTION)["spec"]["template"]["spec"][
        "topologySpreadConstraints"
    ]
    labels = one("Deployment", API, *PRODUCTION)["spec"]["template"]["metadata"]["labels"]

    assert found["topologyKey"] == "topology.kubernetes.io/zone"
    assert found["labelSelector"]["matchLabels"].items() <= labels.items()


def test_a_selector_that_is_given_is_left_alone() -> None:
    path = "apiServer.scheduling.topologySpreadConstraints[0]"
    own = f"{path}.labelSelector.matchLabels.team=a,{path}.maxSkew=1"

    (found,) = one("Deployment", API, "--set", own)["spec"]["template"]["spec"][
        "topologySpreadConstraints"
    ]

    assert found["labelSelector"] == {"matchLabels": {"team": "a"}}


@pytest.mark.parametrize("name", HOOKS)
def test_pods_of_hooks_reach_what_they_need_where_everything_else_is_denied(name: str) -> None:
    kind, hook = HOOKS[name]
    policy, maker = one("NetworkPolicy", name), one(kind, name)
    pod = maker["spec"]["template"] if kind == "Job" else maker
    annotations = policy["metadata"]["annotations"]
    ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}

    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert selected.items() <= pod["metadata"]["labels"].items()
    assert annotations["helm.sh/hook"] == maker["metadata"]["annotations"]["helm.sh/hook"] == hook
    # Hooks of lower weight come first; a Job and a Pod have none, which is 0.
    assert int(annotations["helm.sh/hook-weight"]) < 0
    assert ports == ({53, 5353, 443, 6443} if hook == "pre-delete" else {53, 5353, 8000})


def test_without_network_policies_hooks_have_none() -> None:
    assert of_kind("NetworkPolicy", "--set", "networkPolicy.enabled=false") == []


EXTRAS = {
    "extraEnv[0].name": "PGPASSWORD",
    "extraEnv[0].valueFrom.secretKeyRef.name": "database",
    "extraEnv[0].valueFrom.secretKeyRef.key": "password",
    "envFrom[0].configMapRef.name": "proxies",
    "extraVolumes[0].name": "sockets",
    "extraVolumeMounts[0].name": "sockets",
    "extraVolumeMounts[0].mountPath": "/sockets",
    "extraContainers[0].name": "proxy",
    "extraContainers[0].image": "cloud-sql-proxy:2",
}


def test_the_api_servers_pods_take_further_variables_volumes_and_containers() -> None:
    options = ",".join(f"apiServer.{key}={value}" for key, value in EXTRAS.items())

    pod = one("Deployment", API, "--set", options, *PRODUCTION)["spec"]["template"]["spec"]

    api, proxy = pod["containers"]
    assert proxy == {"name": "proxy", "image": "cloud-sql-proxy:2"}
    assert api["env"][-1]["valueFrom"]["secretKeyRef"] == {"name": "database", "key": "password"}
    assert api["envFrom"] == [
        {"secretRef": {"name": "checkpoint-store"}},
        {"configMapRef": {"name": "proxies"}},
    ]
    assert api["volumeMounts"][-1] == {"name": "sockets", "mountPath": "/sockets"}
    assert pod["volumes"][-1] == {"name": "sockets"}


def test_api_server_and_sessions_trust_the_bundle_that_is_named() -> None:
    named = "caBundle.configMap=authorities,caBundle.key=ca.pem"
    server = one("Deployment", API, "--set", named)
    pod = server["spec"]["template"]["spec"]
    (mount,) = (
        each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "ca-bundle"
    )
    (volume,) = (each for each in pod["volumes"] if each["name"] == "ca-bundle")

    operator = environment(one("Deployment", OPERATOR, "--set", named))

    assert environment(server)["SSL_CERT_FILE"] == f"{mount['mountPath']}/ca.pem"
    assert volume["configMap"]["name"] == "authorities"
    assert operator["TINKERCLOUD_OPERATOR_CA_CONFIG_MAP"] == "authorities"
    assert operator["TINKERCLOUD_OPERATOR_CA_KEY"] == "ca.pem"


def test_without_a_bundle_nothing_is_mounted_or_configured() -> None:
    assert "ca-bundle" not in str(objects())
    assert "SSL_CERT_FILE" not in environment(one("Deployment", API))
