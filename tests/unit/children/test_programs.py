"""The Job of a program and its NetworkPolicy: what its pod may do, and what it receives."""

from typing import Any

import pytest

from tinkercloud_crds import labels
from tinkercloud_crds.names import Names
from tinkercloud_crds.pods.program_fields import Program, Programs
from tinkercloud_operator.children.program import ProgramBuild, program_job, program_policy
from tinkercloud_operator.settings import Settings
from tinkercloud_testing.resources.sessions import PROGRAM, PROGRAMS, Json, a_session

URL = "http://api.default.svc:80"


def a_program(
    program: Json | None = None, offer: Json | None = None, session: Json | None = None, **of: Any
) -> ProgramBuild:
    return ProgramBuild(
        Names("one"),
        a_session(**(session or {})),
        Program.model_validate(PROGRAM | (program or {})),
        Programs.model_validate(PROGRAMS | (offer or {})),
        Settings(**of),
        URL,
    )


def pod_of(build: ProgramBuild) -> Json:
    spec: Json = program_job(build)["spec"]["template"]["spec"]
    return spec


def container_of(build: ProgramBuild) -> Json:
    [container] = pod_of(build)["containers"]
    found: Json = container
    return found


def variables(build: ProgramBuild) -> dict[str, str]:
    env = container_of(build)["env"]
    return {each["name"]: each["value"] for each in env if "value" in each}


def test_a_pod_is_restricted_and_has_no_credentials_but_its_key() -> None:
    pod, container = pod_of(a_program()), container_of(a_program())

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == "default"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert "envFrom" not in container
    secret = {"secretKeyRef": {"name": "research-key", "key": "apiKey"}}
    [key] = [each for each in container["env"] if "valueFrom" in each]
    assert key == {"name": "TINKER_API_KEY", "valueFrom": secret}


def test_a_pod_stops_when_it_is_asked_to() -> None:
    assert pod_of(a_program())["shareProcessNamespace"] is True


def test_resources_are_bounded_by_the_base_model() -> None:
    build = a_program(offer={"resources": {"cpu": "2", "memory": "3Gi", "scratch": "5Gi"}})

    needs = {"cpu": "2", "memory": "3Gi"}
    assert container_of(build)["resources"] == {"requests": needs, "limits": needs}
    sizes = [volume["emptyDir"]["sizeLimit"] for volume in pod_of(build)["volumes"]]
    assert sizes == ["5Gi", "5Gi"]


def test_a_module_runs_with_its_arguments_as_they_are() -> None:
    container = container_of(a_program({"args": ["$(TINKER_API_KEY)", "--x"]}))

    assert container["command"] == ["python", "-m", "tinker_cookbook.recipes.sl_basic"]
    assert container["args"] == ["$$(TINKER_API_KEY)", "--x"]


def test_a_source_runs_as_a_file() -> None:
    build = a_program({"module": None, "sourceSecret": {"name": "source"}})

    assert container_of(build)["command"] == ["python", "/source/program.py"]
    [source] = [each for each in pod_of(build)["volumes"] if each["name"] == "source"]
    assert source["secret"]["secretName"] == "source"
    mounts = {each["name"]: each for each in container_of(build)["volumeMounts"]}
    assert mounts["source"]["readOnly"] is True


def test_the_models_of_a_declared_session_are_served_by_it() -> None:
    assert variables(a_program()) == {
        "HOME": "/program",
        "HF_ENDPOINT": f"{URL}/hf",
        "PYTHONUNBUFFERED": "1",
        "TINKERCLOUD_BASE_MODEL": "Qwen/Qwen3-8B",
        "TINKERCLOUD_PROGRAM_DIR": "/program",
        "TINKER_BASE_URL": URL,
        "TINKER_TAGS": "tinkercloud.dev/session=one",
    }


def test_a_program_of_a_model_gets_its_id_and_its_own() -> None:
    found = variables(a_program({"id": "p-1"}, session={"modelId": "s:train:0"}))

    assert found["TINKERCLOUD_MODEL_ID"] == "s:train:0"
    assert found["TINKERCLOUD_PROGRAM_ID"] == "p-1"
    assert "TINKER_TAGS" not in found


def test_variables_of_the_author_are_added() -> None:
    found = variables(a_program({"env": [{"name": "TINKER_TAGS", "value": "mine"}]}))

    assert found["TINKER_TAGS"] == "mine"


@pytest.mark.parametrize(
    ("asked", "offer", "image"),
    [
        ({}, {}, "programs:1"),
        ({}, {"defaultImage": "programs:2"}, "programs:2"),
        ({"image": "programs:2"}, {"defaultImage": "programs:1"}, "programs:2"),
    ],
)
def test_the_image_is_the_named_one_or_the_default(asked: Json, offer: Json, image: str) -> None:
    assert container_of(a_program(asked, offer))["image"] == image


def test_failures_are_retried_evictions_do_not_count_and_final_errors_end_it() -> None:
    spec = program_job(a_program(offer={"activeDeadlineSeconds": 60}))["spec"]

    assert spec["backoffLimit"] == 2
    assert spec["activeDeadlineSeconds"] == 60
    assert spec["podReplacementPolicy"] == "Failed"
    final, eviction = spec["podFailurePolicy"]["rules"]
    assert (final["action"], final["onExitCodes"]["values"]) == ("FailJob", [78])
    assert eviction["action"] == "Ignore"


def test_a_pod_has_no_label_of_the_session_s_own_pods() -> None:
    metadata = program_job(a_program(pod_labels={"identity": "store"}))["spec"]["template"]

    assert metadata["metadata"]["labels"] == {
        labels.PROGRAM_LABEL: "one",
        labels.COMPONENT_LABEL: "program",
        labels.MANAGED_BY_LABEL: labels.MANAGED_BY,
    }


def test_only_dns_and_the_api_server_can_be_reached_and_nothing_reaches_the_pod() -> None:
    spec = program_policy(a_program(api_labels={"app": "api"}, api_port=8123))["spec"]

    assert spec["podSelector"] == {"matchLabels": {labels.PROGRAM_LABEL: "one"}}
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in spec
    dns, api = spec["egress"]
    assert {each["port"] for each in dns["ports"]} == {53, 5353}
    assert api == {
        "to": [{"podSelector": {"matchLabels": {"app": "api"}}}],
        "ports": [{"protocol": "TCP", "port": 8123}],
    }


def test_private_authorities_are_trusted() -> None:
    build = a_program(ca_config_map="authorities")

    assert variables(build)["SSL_CERT_FILE"] == "/etc/tinkercloud-ca/ca-bundle.crt"
    assert "ca-bundle" in {each["name"] for each in container_of(build)["volumeMounts"]}
