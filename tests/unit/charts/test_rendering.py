"""What the chart makes of values that people have."""

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinkercloud_api.config.settings import Settings as ApiSettings
from tinkercloud_operator.settings import Settings as OperatorSettings
from tinkercloud_testing.resources.charts import (
    CASES,
    CHART,
    CRD_CHART,
    NAMESPACE,
    ROOT,
    VERSION,
    Manifest,
    environment,
    helm,
    objects,
    of_kind,
    one,
    template,
)

API, OPERATOR = "tinker-tinkercloud-api", "tinker-tinkercloud-operator"
POSTGRES = ("--set", "database.existingSecret=db")
every_case = pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)


@every_case
def test_values_that_people_have_pass_the_linter(case: Path) -> None:
    helm("lint", "--strict", str(CHART), "--values", str(case))


def test_the_definitions_pass_the_linter() -> None:
    helm("lint", "--strict", str(CRD_CHART))


def test_the_definitions_outlive_their_release() -> None:
    everything = yaml.safe_load_all(helm("template", "crds", str(CRD_CHART)))
    found = [each for each in everything if each["kind"] == "CustomResourceDefinition"]

    kinds = {each["spec"]["names"]["kind"] for each in found}
    assert kinds == {"BaseModel", "TrainingSession", "Tenant"}
    assert {each["metadata"]["annotations"]["helm.sh/resource-policy"] for each in found} == {
        "keep"
    }


@every_case
def test_objects_are_named_once_and_live_in_the_namespace_of_the_release(case: Path) -> None:
    found = objects("--values", str(case))

    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    elsewhere = {each["kind"] for each in found if each["metadata"].get("namespace") != NAMESPACE}

    assert len(names) == len(set(names))
    assert elsewhere <= {"ClusterRole", "ClusterRoleBinding"}
    assert max(len(name) for kind, name in names if kind not in elsewhere) <= 63


@every_case
def test_rendering_twice_gives_the_same_but_for_a_key_that_the_chart_makes(case: Path) -> None:
    options = ("--namespace", NAMESPACE, "--values", str(case))
    named = ("--set", "apiServer.bootstrapKey.existingSecret=first-key")

    first, second = (helm("template", "tinker", str(CHART), *options, *named) for _ in range(2))

    assert first == second


@every_case
def test_the_notes_tell_how_to_connect(case: Path) -> None:
    options = ("--namespace", NAMESPACE, "--values", str(case), "--dry-run=client")

    notes = helm("install", "tinker", str(CHART), *options).partition("NOTES:")[2]

    assert f"kubectl -n {NAMESPACE} port-forward service/" in notes
    assert "export TINKER_API_KEY=$(kubectl" in notes
    assert "create_lora_training_client" in notes


def test_the_notes_and_the_page_install_the_release_of_kuberay_that_the_chart_would() -> None:
    chart = yaml.safe_load((CHART / "charts" / "kuberay" / "Chart.yaml").read_text())
    (kuberay,) = chart["dependencies"]
    options = ("--namespace", NAMESPACE, "--dry-run=client")
    notes = helm("install", "tinker", str(CHART), *options).partition("NOTES:")[2]
    page = (ROOT / "docs" / "operate" / "installation.md").read_text()

    commands = [
        line for line in (notes + page).splitlines() if "helm install kuberay-operator" in line
    ]

    assert len(commands) == 2
    assert all(f"--version {kuberay['version']} " in f"{command} " for command in commands)


def test_the_key_that_the_chart_makes_is_random_and_one_the_sdk_accepts() -> None:
    name = "tinker-tinkercloud-bootstrap-key"
    options = ("--namespace", NAMESPACE, "--show-only", "templates/api-server/bootstrap-key.yaml")

    rendered = [yaml.safe_load(helm("template", "tinker", str(CHART), *options)) for _ in range(2)]
    keys = [base64.b64decode(each["data"]["key"]).decode() for each in rendered]

    assert rendered[0]["metadata"]["name"] == name
    assert all(key.startswith("tml-") and len(key) == len("tml-") + 43 for key in keys)
    assert keys[0] != keys[1]


PROXIES = {
    "production": ["10.0.0.0/8", "fd00::/8"],
    "ingress-nginx": ["10.0.0.0/8"],
    "traefik": ["10.0.0.0/8"],
}
"""Proxies that the values trust, by name of the file."""
FROM_SECRETS = {
    "TINKERCLOUD_BOOTSTRAP_KEY": "tml-a-random-key-from-elsewhere",
    "TINKERCLOUD_DOWNLOADS__SIGNING_KEY": "a-random-signing-key-0123456789-from-elsewhere",
    "TINKERCLOUD_DATABASE_URL": "postgresql+asyncpg://u:p@postgres/tinkercloud",
}


def test_no_key_is_made_where_a_secret_is_named() -> None:
    assert of_kind("Secret", "--set", "apiServer.bootstrapKey.existingSecret=mine") == []


@every_case
def test_the_api_server_knows_every_setting_it_gets(
    case: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (deployment,) = (
        each
        for each in of_kind("Deployment", "--values", str(case))
        if each["metadata"]["labels"]["app.kubernetes.io/component"] == "api"
    )
    given = {
        name: value or FROM_SECRETS.get(name, "from-elsewhere")
        for name, value in environment(deployment).items()
        if name.startswith("TINKERCLOUD_")
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    settings = ApiSettings()

    assert settings.provider == "kubernetes"
    named = [str(network) for network in settings.trusted_proxies]
    assert named == PROXIES.get(case.stem, [])
    assert {name.removeprefix("TINKERCLOUD_").split("__")[0].lower() for name in given} <= set(
        ApiSettings.model_fields
    )


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.stem) for case in CASES],
)
def test_the_operator_knows_every_setting_it_gets(
    case: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (deployment,) = (
        each
        for each in of_kind("Deployment", "--values", str(case))
        if each["metadata"]["labels"]["app.kubernetes.io/component"] == "operator"
    )
    prefix = "TINKERCLOUD_OPERATOR_"
    given = {name: v for name, v in environment(deployment).items() if name.startswith(prefix)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    OperatorSettings()

    assert {name.removeprefix(prefix).lower() for name in given} <= set(
        OperatorSettings.model_fields
    )


def test_both_programs_are_configured_with_the_same_store() -> None:
    options = ("--set", "checkpoints.root=s3://bucket/x,checkpoints.existingSecret=store")

    api, operator = one("Deployment", API, *options), one("Deployment", OPERATOR, *options)
    (container,) = api["spec"]["template"]["spec"]["containers"]

    assert environment(api)["TINKERCLOUD_CHECKPOINT_ROOT"] == "s3://bucket/x"
    assert environment(operator)["TINKERCLOUD_OPERATOR_CHECKPOINT_ROOT"] == "s3://bucket/x"
    assert container["envFrom"] == [{"secretRef": {"name": "store"}}]
    assert environment(operator)["TINKERCLOUD_OPERATOR_CHECKPOINT_SECRET"] == "store"
    assert [each["metadata"]["name"] for each in of_kind("PersistentVolumeClaim", *options)] == [
        "tinker-tinkercloud-catalog"
    ]


def test_a_volume_of_checkpoints_is_mounted_where_both_programs_look() -> None:
    spec = one("Deployment", API)["spec"]["template"]["spec"]
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    variables = environment(one("Deployment", OPERATOR))["TINKERCLOUD_OPERATOR_CHECKPOINT_CLAIM"]

    assert mounts["checkpoints"] == "/checkpoints"
    assert claims["checkpoints"] == variables == "tinker-tinkercloud-checkpoints"


@pytest.mark.parametrize(
    ("options", "strategy"), [((), "Recreate"), (POSTGRES, "RollingUpdate")], ids=str
)
def test_only_postgresql_lets_two_api_servers_run_at_a_time(
    options: tuple[str, ...], strategy: str
) -> None:
    assert one("Deployment", API, *options)["spec"]["strategy"]["type"] == strategy


def test_pods_of_the_api_server_get_requests_while_the_checkpoint_store_fails() -> None:
    (container,) = one("Deployment", API)["spec"]["template"]["spec"]["containers"]

    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_the_autoscaler_alone_decides_how_many_pods_there_are() -> None:
    options = (*POSTGRES, "--set", "apiServer.autoscaling.enabled=true")

    (scaler,) = of_kind("HorizontalPodAutoscaler", *options)

    assert scaler["spec"]["scaleTargetRef"]["name"] == API
    assert "replicas" not in one("Deployment", API, *options)["spec"]


def test_a_single_pod_has_no_budget_that_would_block_a_drain() -> None:
    names = {each["metadata"]["name"] for each in of_kind("PodDisruptionBudget")}

    assert names == {OPERATOR}


NAMED = (
    "nameOverride",
    "image.pullSecrets[0]",
    "apiServer.bootstrapKey.existingSecret",
    "apiServer.downloads.existingSecret",
    "apiServer.modelClaims[0]",
    "apiServer.serviceAccount.name",
    "apiServer.scheduling.priorityClassName",
    "database.volume.existingClaim",
    "database.volume.storageClassName",
    "checkpoints.existingSecret",
    "checkpoints.volume.existingClaim",
    "operator.serviceAccount.name",
    "operator.scheduling.priorityClassName",
    "sessions.serviceAccount.name",
    "ingress.className",
    "ingress.tlsSecret",
    "baseModels[0].name",
)


def named(name: str) -> list[Manifest]:
    """Return the chart's objects where everything that has a name has this one."""
    options = ["--set=fullnameOverride=tc,ingress.enabled=true,metrics.dashboards.enabled=true"]
    options += [f"--set-string={value}={name}" for value in NAMED]
    options += ["--set", "baseModels[0].spec.modelName=a/b,baseModels[0].spec.source.hub=a/b"]
    options += ["--set", "baseModels[0].spec.maxContextLength=64,baseModels[0].spec.head.image=x"]
    rendered = helm("template", name, str(CHART), "--namespace", NAMESPACE, *options)
    return [found for found in yaml.safe_load_all(rendered) if found is not None]


def with_names(value: Any, old: str, new: str) -> Any:
    """Return the same with another name in every text, at any depth."""
    if isinstance(value, dict):
        return {key: with_names(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [with_names(each, old, new) for each in value]
    return value.replace(old, new) if isinstance(value, str) else value


def test_names_that_look_like_numbers_are_names() -> None:
    assert named("2024") == with_names(named("omega"), "omega", "2024")


def test_large_user_ids_are_written_as_whole_numbers(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("podSecurity: {runAsUser: 1000680000, fsGroup: 1000680000}\n")

    rendered = helm("template", "tinker", str(CHART), "--values", str(values))

    users = {line.strip() for line in rendered.splitlines() if "runAsUser:" in line}
    groups = {line.strip() for line in rendered.splitlines() if "fsGroup:" in line}
    assert users == {"runAsUser: 1000680000"}
    assert groups == {"fsGroup: 1000680000"}


@pytest.mark.parametrize(
    "option",
    [
        "commonLabels.app\\.kubernetes\\.io/part-of=research",
        "metrics.serviceMonitor.labels.app\\.kubernetes\\.io/name=found",
        "metrics.dashboards.labels.app\\.kubernetes\\.io/name=found",
    ],
)
def test_a_label_that_the_chart_sets_too_is_there_once(option: str) -> None:
    options = ("--set", "metrics.serviceMonitor.enabled=true,metrics.dashboards.enabled=true")

    assert repeated_keys(template(*options, "--set", option)) == []


def repeated_keys(rendered: str) -> list[str]:
    """Return the keys that a mapping has twice, which parsers may refuse."""
    nodes = list(yaml.compose_all(rendered, yaml.SafeLoader))
    found = []
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            found += [key for key in set(keys) if keys.count(key) > 1]
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    return found


def test_the_user_of_operator_and_session_pods_can_be_left_unset() -> None:
    options = ("--values", str(CHART / "ci" / "openshift.yaml"))

    spec = one("Deployment", OPERATOR, *options)["spec"]["template"]["spec"]
    variables = environment(one("Deployment", OPERATOR, *options))

    assert not spec["securityContext"].keys() & {"runAsUser", "fsGroup"}
    assert variables["TINKERCLOUD_OPERATOR_RUN_AS_USER"] == "null"
    assert variables["TINKERCLOUD_OPERATOR_FS_GROUP"] == "null"


def test_the_operator_is_configured_with_the_settings_that_session_pods_share_with_the_chart() -> (
    None
):
    options = (
        "podSecurity.fsGroup=2000",
        "image.pullPolicy=Always",
        "sessions.reserveScratch=true",
    )

    variables = environment(one("Deployment", OPERATOR, "--set", ",".join(options)))

    assert variables["TINKERCLOUD_OPERATOR_FS_GROUP"] == "2000"
    assert variables["TINKERCLOUD_OPERATOR_IMAGE_PULL_POLICY"] == "Always"
    assert variables["TINKERCLOUD_OPERATOR_RESERVE_SCRATCH"] == "true"


WORKLOAD_IDENTITY = "azure\\.workload\\.identity/use=true"


def test_pods_of_the_api_server_are_labelled_as_a_cloud_wants_it_and_still_found() -> None:
    ours = "apiServer.podLabels.app\\.kubernetes\\.io/component=theirs"
    options = ("--set-string", f"apiServer.podLabels.{WORKLOAD_IDENTITY}", "--set", ours)

    spec = one("Deployment", API, *options)["spec"]
    labels = spec["template"]["metadata"]["labels"]

    assert labels["azure.workload.identity/use"] == "true"
    assert spec["selector"]["matchLabels"].items() <= labels.items()


def test_the_operator_is_configured_with_the_labels_of_session_pods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("--set-string", f"sessions.podLabels.{WORKLOAD_IDENTITY}")
    name = "TINKERCLOUD_OPERATOR_POD_LABELS"

    monkeypatch.setenv(name, environment(one("Deployment", OPERATOR, *options))[name])

    assert OperatorSettings().pod_labels == {"azure.workload.identity/use": "true"}


@pytest.mark.parametrize(
    ("options", "image"),
    [
        ("image.tag=v2", "tinkercloud-api:v2"),
        ("image.registry=r.example.com/ml", f"r.example.com/ml/tinkercloud-api:{VERSION}"),
        ("apiServer.image.repository=a/b,apiServer.image.tag=c", "a/b:c"),
        (f"apiServer.image.digest=sha256:{'0' * 64}", f"tinkercloud-api@sha256:{'0' * 64}"),
    ],
)
def test_every_part_of_an_image_can_be_chosen(options: str, image: str) -> None:
    (container,) = one("Deployment", API, "--set", options)["spec"]["template"]["spec"][
        "containers"
    ]

    assert container["image"] == image


def test_routes_hold_a_request_longer_than_a_long_poll() -> None:
    options = ("--values", str(CHART / "ci" / "production.yaml"))
    (route,) = of_kind("HTTPRoute", *options)
    (ingress,) = of_kind("Ingress", "--set", "ingress.enabled=true")
    seconds = ApiSettings.model_fields["timings"].default.long_poll_seconds

    timeouts = [rule["timeouts"]["request"] for rule in route["spec"]["rules"]]
    nginx = ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-read-timeout"]

    # 0 means no limit.
    assert all(text == "0s" or int(text.removesuffix("s")) > seconds for text in timeouts)
    assert any(text != "0s" for text in timeouts)
    assert int(nginx) > seconds


def test_models_in_the_values_become_base_models() -> None:
    (found,) = of_kind("BaseModel", "--values", str(CHART / "examples" / "laptop-kind.yaml"))

    assert found["spec"]["modelName"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_uninstalling_deletes_sessions_while_the_operator_still_runs() -> None:
    (job,) = of_kind("Job")

    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    assert of_kind("Job", "--set", "sessions.deleteOnUninstall=false") == []


def test_data_outlives_the_release_by_default() -> None:
    kept = of_kind("PersistentVolumeClaim")
    dropped = of_kind(
        "PersistentVolumeClaim",
        "--set",
        "database.volume.retain=false,checkpoints.volume.retain=false",
    )

    assert [each["metadata"].get("annotations") for each in kept] == [
        {"helm.sh/resource-policy": "keep"}
    ] * 2
    assert [each["metadata"].get("annotations") for each in dropped] == [None] * 2
