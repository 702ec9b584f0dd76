"""What the programs may do in the cluster, and how their pods are confined."""

from pathlib import Path
from typing import Any

import pytest

from tinkercloud_testing.resources.charts import (
    CASES,
    CHART,
    NAMESPACE,
    environment,
    objects,
    of_kind,
    one,
    pod_specs,
)

every_case = pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
API, OPERATOR = "tinker-tinkercloud-api", "tinker-tinkercloud-operator"
FOLLOW = {"list", "watch"}
READ = FOLLOW | {"get"}
NAME_OF_NAMESPACE = "kubernetes.io/metadata.name"
OWN = FOLLOW | {"create", "patch", "delete"}


def rights(role: dict[str, Any]) -> dict[str, set[str]]:
    """Verbs by group/resource, or group/resource/name."""
    return {
        "/".join(filter(None, (group, resource, *rule.get("resourceNames", [])))): set(
            rule["verbs"]
        )
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def test_the_api_server_has_these_rights_and_no_others() -> None:
    assert rights(one("Role", API)) == {
        "tinkercloud.dev/trainingsessions": OWN | {"get"},
        "tinkercloud.dev/basemodels": FOLLOW,
        "tinkercloud.dev/tenants": FOLLOW,
        "secrets": {"get", "create"},
        "pods": {"list"},
        "pods/log": {"get"},
    }


def test_the_operator_has_these_rights_and_no_others() -> None:
    assert rights(one("Role", OPERATOR)) == {
        "tinkercloud.dev/basemodels": FOLLOW | {"patch"},
        "tinkercloud.dev/basemodels/status": {"patch"},
        "tinkercloud.dev/tenants": FOLLOW,
        "tinkercloud.dev/tenants/status": {"patch"},
        "tinkercloud.dev/trainingsessions": OWN | {"get"},
        "tinkercloud.dev/trainingsessions/status": {"patch"},
        "ray.io/rayclusters": OWN,
        "pods": FOLLOW,
        "services": OWN,
        "configmaps": OWN,
        "secrets": {"get", "create"},
        "networking.k8s.io/networkpolicies": OWN,
        "policy/poddisruptionbudgets": OWN,
        "batch/jobs": OWN,
        "resource.k8s.io/resourceclaimtemplates": OWN,
        "events": {"create"},
        f"coordination.k8s.io/leases/{OPERATOR}": READ | {"update", "patch"},
    }


def test_outside_its_namespace_the_operator_only_reads_nodes_and_only_if_allowed() -> None:
    (role,) = of_kind("ClusterRole")

    assert rights(role) == {"nodes": FOLLOW}
    assert of_kind("ClusterRole", "--set", "operator.readNodes=false") == []
    assert of_kind("ClusterRoleBinding", "--set", "operator.readNodes=false") == []


@every_case
def test_no_role_has_wildcards_or_lists_secrets(case: Path) -> None:
    roles = [each for each in objects("--values", str(case)) if each["kind"].endswith("Role")]
    rules = [rule for role in roles for rule in role["rules"]]

    wild = [rule for rule in rules if "*" in rule["apiGroups"] + rule["resources"] + rule["verbs"]]
    of_secrets = [rule["verbs"] for rule in rules if "secrets" in rule["resources"]]

    assert rules
    assert wild == []
    assert not {"list", "watch", "deletecollection"} & set().union(*of_secrets)


@every_case
def test_roles_are_bound_to_accounts_that_exist_and_sessions_get_none(case: Path) -> None:
    found = objects("--values", str(case))
    accounts = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each["metadata"]["name"]
        for each in found
        if each["kind"] == "ServiceAccount"
    }
    subjects = [
        subject
        for each in found
        if each["kind"].endswith("RoleBinding")
        for subject in each["subjects"]
    ]

    assert set(accounts) == {"api", "operator", "session"}
    assert {subject["name"] for subject in subjects} == {accounts["api"], accounts["operator"]}
    assert {subject["namespace"] for subject in subjects} == {NAMESPACE}


ACCOUNTS = {"apiServer": "api", "operator": "operator", "sessions": "session"}
each_account = pytest.mark.parametrize("field", ACCOUNTS)


@each_account
def test_an_account_that_exists_is_used_and_not_made(field: str) -> None:
    account = f"{field}.serviceAccount"
    options = ("--set", f"{account}.create=false,{account}.name=existing")

    made = {each["metadata"]["name"] for each in of_kind("ServiceAccount", *options)}
    bound = {
        subject["name"] for each in of_kind("RoleBinding", *options) for subject in each["subjects"]
    }
    used = {spec.get("serviceAccountName") for _, spec in pod_specs(*options)}
    variables = environment(one("Deployment", OPERATOR, *options))

    others = {f"tinker-tinkercloud-{name}" for key, name in ACCOUNTS.items() if key != field}
    assert made == others
    if field == "sessions":
        assert variables["TINKERCLOUD_OPERATOR_SERVICE_ACCOUNT"] == "existing"
    else:
        assert "existing" in bound
        assert "existing" in used


@pytest.mark.parametrize("name", [API, OPERATOR])
def test_names_are_asked_for_at_the_port_of_the_service_and_at_that_of_openshifts_dns_pods(
    name: str,
) -> None:
    dns = one("NetworkPolicy", name)["spec"]["egress"][0]

    assert dns == {
        "ports": [
            {"protocol": "UDP", "port": 53},
            {"protocol": "TCP", "port": 53},
            {"protocol": "UDP", "port": 5353},
            {"protocol": "TCP", "port": 5353},
        ]
    }


@every_case
def test_every_pod_meets_the_restricted_standard(case: Path) -> None:
    for name, spec in pod_specs("--values", str(case)):
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}, name
        assert not any("hostPath" in volume for volume in spec["volumes"]), name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name


@every_case
def test_every_container_is_bounded_and_writes_only_to_volumes(case: Path) -> None:
    for name, spec in pod_specs("--values", str(case)):
        for container in spec["containers"]:
            assert container["resources"]["limits"]["memory"], name
            assert "tmp" in {mount["name"] for mount in container["volumeMounts"]}, name


@every_case
def test_no_pod_gets_variables_named_after_services(case: Path) -> None:
    links = {name: spec["enableServiceLinks"] for name, spec in pod_specs("--values", str(case))}

    assert links
    assert set(links.values()) == {False}


def test_policies_select_the_pods_they_are_for() -> None:
    options = ("--values", str(CHART / "ci" / "production.yaml"))
    selected = {
        each["metadata"]["name"]: each["spec"]["podSelector"]["matchLabels"]
        for each in of_kind("NetworkPolicy", *options)
    }
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in of_kind("Deployment", *options)
    }

    heads = selected.pop("tinker-tinkercloud-session-metrics")

    for hook in ("tinker-tinkercloud-delete-sessions", "tinker-tinkercloud-test"):
        selected.pop(hook)

    assert set(selected) == set(pods) == {API, OPERATOR}
    assert not any(heads.items() <= labels.items() for labels in pods.values())
    assert all(selected[name].items() <= pods[name].items() for name in pods)
    assert not selected[API].items() <= pods[OPERATOR].items()


def test_only_named_peers_reach_the_api_server_and_its_metrics() -> None:
    options = ("--values", str(CHART / "ci" / "production.yaml"))

    rules = one("NetworkPolicy", API, *options)["spec"]["ingress"]

    peers = {rule["ports"][0]["port"]: rule["from"] for rule in rules}
    gateways, programs, test = peers[8000]
    of_programs = programs["podSelector"]["matchExpressions"]
    assert of_programs == [{"key": "tinkercloud.dev/program", "operator": "Exists"}]
    (monitoring,) = peers[9090]
    assert gateways == {"namespaceSelector": {"matchLabels": {NAME_OF_NAMESPACE: "gateways"}}}
    assert monitoring == {"namespaceSelector": {"matchLabels": {NAME_OF_NAMESPACE: "monitoring"}}}
    labels = one("Pod", "tinker-tinkercloud-test", *options)["metadata"]["labels"]
    assert test["podSelector"]["matchLabels"].items() <= labels.items()
