"""The chart's values: one documented source, closed, with defaults that are acceptable."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tinkercloud_api.config.sections.login_settings import OidcSettings
from tinkercloud_api.config.settings import Settings
from tinkercloud_testing.resources.charts import (
    CHART,
    ROOT,
    HelmFailed,
    environment,
    helm,
    one,
    template,
)

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


ISSUER = (
    "apiServer.publicUrl=https://tinker.example.com,oidc.issuer=https://id.example.com/realms/ml"
    ",oidc.clientId=tinkercloud,oidc.existingSecret=provider,oidc.allowedGroups={research,ops}"
)


def described(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, part in schema.get("properties", {}).items():
        yield f"{path}{name}", part
        yield from described(part, f"{path}{name}.")


def given(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield f"{path}{name}"
        part = schema["properties"][name]
        if "properties" in part:
            yield from given(value, part, f"{path}{name}.")


def test_what_is_derived_from_the_documented_source_is_fresh() -> None:
    subprocess.run([sys.executable, "tools/charts.py", "--check"], cwd=ROOT, check=True)


def test_every_value_is_described() -> None:
    silent = [path for path, part in described(SCHEMA) if not part.get("description")]

    assert silent == []


def test_every_object_of_known_fields_is_closed() -> None:
    closed = {path: part.get("additionalProperties") for path, part in described(SCHEMA)}
    known = [path for path, part in described(SCHEMA) if "properties" in part]

    assert SCHEMA["additionalProperties"] is False
    assert [path for path in known if closed[path] is not False] == []


def test_values_and_schema_name_the_same_fields() -> None:
    absent_by_default = {"global", "kuberay.global"}

    assert set(given(VALUES, SCHEMA)) == {path for path, _ in described(SCHEMA)} - absent_by_default


def test_the_setting_that_the_chart_gives_as_an_example_is_one_of_a_server_on_kubernetes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = SCHEMA["properties"]["apiServer"]["properties"]["env"]["description"]
    ((name, value),) = re.findall(r'`(TINKERCLOUD_\w+): "(\w+)"`', text)

    monkeypatch.setenv(name, value)

    Settings(provider="kubernetes", checkpoint_root="s3://bucket/x")


def test_the_defaults_are_acceptable() -> None:
    template()


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("replicas=2", "'replicas' not allowed"),
        ("apiServer.replica=2", "'replica' not allowed"),
        ("apiServer.replicas=two", "want integer"),
        ("operator.scheduling.nodeSelectors.a=b", "'nodeSelectors' not allowed"),
        ("nameOverride=my app", "does not match pattern"),
        ("checkpoints.root=/checkpoints", "does not match pattern"),
        ("image.pullPolicy=Sometimes", "value must be one of"),
        ("baseModels[0].name=x,baseModels[0].spec.modelNam=y", "'modelNam' not allowed"),
    ],
)
def test_a_value_nobody_reads_or_of_the_wrong_kind_is_refused(option: str, complaint: str) -> None:
    with pytest.raises(HelmFailed, match=complaint):
        template("--set", option)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("apiServer.replicas=2", "apiServer.replicas is 2 .* set database.existingSecret"),
        ("apiServer.autoscaling.enabled=true", "autoscaling.enabled is true, but SQLite"),
        (
            "database.existingSecret=db,apiServer.autoscaling.minReplicas=9",
            "minReplicas is 9, which exceeds maxReplicas, 8",
        ),
        ("httpRoute.enabled=true", "httpRoute.parentRefs is empty"),
        (
            "apiServer.env.TINKERCLOUD_STATE_DIR=/x",
            "TINKERCLOUD_STATE_DIR is already set by the chart",
        ),
        (
            "operator.env.TINKERCLOUD_OPERATOR_NAMESPACE=x",
            "OPERATOR_NAMESPACE is already set by the chart",
        ),
        (
            "operator.serviceAccount.create=false",
            "operator.serviceAccount.create is false and no name is set",
        ),
        (
            "sessions.serviceAccount.create=false,sessions.serviceAccount.name=mine"
            ",sessions.serviceAccount.annotations.a=b",
            "annotate mine yourself",
        ),
        ("fullnameOverride=9-lives", '"9-lives", which is not a valid Service name: set fullnameO'),
        ("fullnameOverride=My_App", '"My_App", which is not a valid Service name: set fullnameO'),
        ("kuberay.enabled=true", "helm dependency build charts/tinkercloud/charts/kuberay"),
        (
            "apiServer.extraVolumes[0].name=tmp",
            "apiServer.extraVolumes: the pod already has a volume with name tmp",
        ),
        (
            "apiServer.extraVolumes[0].name=a,apiServer.extraVolumes[1].name=a",
            "already has a volume with name a",
        ),
        (
            "apiServer.extraEnv[0].name=HOME",
            "apiServer.extraEnv: the pod already has a variable with name HOME",
        ),
        (
            "apiServer.env.TINKERCLOUD_HF_MIRROR=x,apiServer.extraEnv[0].name=TINKERCLOUD_HF_MIRROR",
            "already has a variable with name TINKERCLOUD_HF_MIRROR",
        ),
        (
            "apiServer.extraVolumeMounts[0].name=a,apiServer.extraVolumeMounts[0].mountPath=/a",
            "apiServer.extraVolumeMounts: there is no volume a; add it to apiServer.extraVolumes",
        ),
        (
            "apiServer.extraVolumeMounts[0].name=tmp,apiServer.extraVolumeMounts[0].mountPath=/tmp/",
            "already has a mount with mountPath /tmp",
        ),
        (
            "apiServer.extraContainers[0].name=api,apiServer.extraContainers[0].image=x",
            "already has a container with name api",
        ),
        (
            "apiServer.extraContainers[0].name=proxy,apiServer.extraContainers[0].image=x"
            ",apiServer.extraContainers[0].volumeMounts[0].name=socket",
            r"extraContainers \(proxy\): there is no volume socket",
        ),
        (f"{ISSUER},oidc.clientId=", "oidc.clientId is empty"),
        (f"{ISSUER},oidc.existingSecret=", "oidc.existingSecret is empty: set it to a Secret"),
        (f"{ISSUER},oidc.allowedGroups=null", "oidc.allowedGroups is empty: name the groups"),
        (f"{ISSUER},oidc.scopes={{email}}", "oidc.scopes must contain openid; got email"),
        (f"{ISSUER},apiServer.publicUrl=http://a", 'publicUrl, .* https://; got "http://a"'),
        (
            f"{ISSUER},oidc.issuer=https://id.example.com:8443",
            "port 8443, .* add it to networkPolicy.objectStorePorts",
        ),
        (
            "telemetry.otlpEndpoint=http://collector:4318",
            "otlpEndpoint has port 4318, .* add it to networkPolicy.objectStorePorts",
        ),
    ],
)
def test_values_that_do_not_fit_together_are_refused_with_what_to_do(
    options: str, complaint: str
) -> None:
    with pytest.raises(HelmFailed, match=complaint):
        template("--set", options)


def test_the_login_of_the_values_is_what_the_server_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    values = f"{ISSUER},oidc.ownerClaim=preferred_username,oidc.roles.ops=admin,oidc.keyDays=7"
    deployment = one("Deployment", "tinker-tinkercloud-api", "--set", values)
    for name, value in environment(deployment).items():
        if name.startswith(("TINKERCLOUD_OIDC__", "TINKERCLOUD_PUBLIC_URL")):
            monkeypatch.setenv(name, value)

    login = Settings(provider="kubernetes", checkpoint_root="s3://bucket/x").oidc

    assert login is not None
    assert login.issuer == "https://id.example.com/realms/ml"
    assert (login.client_id, login.owner_claim) == ("tinkercloud", "preferred_username")
    assert (login.allowed_groups, login.allow_all_accounts) == (["research", "ops"], False)
    assert (login.roles, login.key_days) == ({"ops": "admin"}, 7)
    pod = deployment["spec"]["template"]["spec"]
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    [secret] = [each["secret"] for each in pod["volumes"] if each["name"] == "oidc"]
    assert secret["items"] == [{"key": "clientSecret", "path": "client-secret"}]
    assert str(login.client_secret_file) == f"{mounts['oidc']}/client-secret"


def test_the_collector_of_the_values_is_that_of_the_server_and_of_the_heads() -> None:
    url = "http://collector:4318"
    values = f"telemetry.otlpEndpoint={url},networkPolicy.objectStorePorts={{443,4318}}"

    for deployment, prefix in (("api", "TINKERCLOUD"), ("operator", "TINKERCLOUD_OPERATOR")):
        name = f"tinker-tinkercloud-{deployment}"
        variable = f"{prefix}_OTLP_ENDPOINT"
        assert environment(one("Deployment", name, "--set", values))[variable] == url
        assert variable not in environment(one("Deployment", name))


def test_the_values_of_the_login_have_the_defaults_of_the_server() -> None:
    fields = OidcSettings.model_fields
    login = VALUES["oidc"]

    assert " ".join(login["scopes"]) == fields["scopes"].default
    assert login["ownerClaim"] == fields["owner_claim"].default
    assert login["groupsClaim"] == fields["groups_claim"].default
    assert login["keyDays"] == fields["key_days"].default
    assert len(login) == len(fields)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("apiServer.replicas=0", "apiServer.replicas is 0, so there is no API server"),
        ("operator.replicas=0", "operator.replicas is 0, so there is no operator"),
        ("apiServer.replicas=1", "is starting in namespace"),
    ],
)
def test_the_notes_say_what_is_stopped(option: str, words: str) -> None:
    notes = helm("install", "tinker", str(CHART), "--dry-run=client", "--set", option)

    assert words in notes
    assert ("is starting in namespace" in notes) == (words == "is starting in namespace")


def test_the_notes_name_the_check_and_the_mirror_of_tokenizers_only_if_it_has_some() -> None:
    install = ("install", "tinker", str(CHART), "--dry-run=client", "--namespace", "research")
    with_volume = helm(*install, "--set", "apiServer.modelClaims={models}")

    notes = helm(*install)

    assert "tinkercloud cluster check --namespace research" in notes
    assert "HF_ENDPOINT" not in notes
    assert "export HF_ENDPOINT=http://127.0.0.1:8000/hf" in with_volume
