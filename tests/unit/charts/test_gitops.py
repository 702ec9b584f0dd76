"""Deployments from Git: what lies in deploy/ follows from the chart, and health is read rightly."""

import dataclasses
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import celpy
import lupa
import pytest
import yaml
from celpy.adapter import json_to_cel

from tinkercloud_crds.base_model import BaseModelSpec, Pool
from tinkercloud_crds.conditions import Reason
from tinkercloud_crds.pods.shapes import HeadShape
from tinkercloud_crds.quota_fields import Amounts, Claimant
from tinkercloud_crds.tenant import TenantSpec
from tinkercloud_crds.training_session import Failing, TrainingSessionSpec, TrainingSessionStatus
from tinkercloud_operator.decide.session.reconcile import reconcile
from tinkercloud_operator.decide.tenancy.tenant_status import tenant_status
from tinkercloud_operator.settings import Settings
from tinkercloud_operator.spec.observed import ChildKey, Observed, Pod, PodProblem
from tinkercloud_testing.cluster.image_build.programs import binary
from tinkercloud_testing.resources.charts import ROOT, VERSION
from tinkercloud_testing.resources.sessions import changed, observed

DEPLOY = ROOT / "deploy"
NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
RUNNING = {ChildKey("RayCluster", "one"): {"metadata": {"name": "one"}, "status": {}}}
"""What a session with pods owns, as far as its status tells."""


def a_session(**changes: Any) -> Observed:
    """A session that somebody uses and that has no pods yet, changed."""
    known = observed(
        namespace="research",
        generation=3,
        created=NOW - timedelta(minutes=5),
        has_finalizer=True,
        spec=TrainingSessionSpec(base_model="tiny/llama", owner="somebody"),
        last_activity=NOW,
        base_model=BaseModelSpec(
            model_name="tiny/llama",
            source={"hub": "tiny/llama"},
            max_context_length=128,
            head=HeadShape(image="worker"),
        ),
        has_secret=True,
        now=NOW,
    )
    return changed(known, **changes)


def a_head(**changes: Any) -> Pod:
    """A head that serves, changed."""
    known = Pod("one-head", "22222222", "head", True, True, True, False, 0, None)
    return dataclasses.replace(known, **changes)


def seen(known: Observed) -> dict[str, Any]:
    """Return the object as the operator would leave it."""
    status = reconcile(known, Settings()).status
    assert status is not None
    return {
        "apiVersion": "tinkercloud.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": {"name": known.session.name, "generation": known.session.generation},
        "status": status.model_dump(by_alias=True, exclude_none=True, mode="json"),
    }


def spec(**changes: Any) -> TrainingSessionSpec:
    return TrainingSessionSpec(base_model="tiny/llama", owner="somebody", **changes)


STARTING = a_session(children=RUNNING, pods=(a_head(is_started=False, is_ready=False),))
SERVING = a_session(children=RUNNING, pods=(a_head(),))
IMPOSSIBLE = a_session(base_model=None)
BROKEN = a_session(
    children=RUNNING,
    pods=(
        a_head(
            is_started=False,
            is_ready=False,
            problem=PodProblem(Reason.IMAGE_PULL_BACK_OFF, "no such image"),
        ),
    ),
)
SUSPENDED = a_session(spec=spec(suspend=True))
FINISHED = a_session(
    status=TrainingSessionStatus(conditions=[], finished_time="2026-11-20T11:59:00Z")
)

FAILED = a_session(
    status=TrainingSessionStatus(
        conditions=[], failing=Failing(since="2026-11-20T10:00:00Z", message="no such image")
    )
)

every_state = pytest.mark.parametrize(
    ("known", "argo", "flux"),
    [
        pytest.param(a_session(), "Progressing", "inProgress", id="not started"),
        pytest.param(STARTING, "Progressing", "inProgress", id="starting"),
        pytest.param(SERVING, "Healthy", "current", id="serving"),
        pytest.param(IMPOSSIBLE, "Degraded", "failed", id="no such model"),
        pytest.param(BROKEN, "Degraded", "failed", id="no such image"),
        pytest.param(SUSPENDED, "Suspended", "current", id="suspended"),
        pytest.param(FAILED, "Degraded", "failed", id="its pods could not run"),
        pytest.param(FINISHED, "Healthy", "current", id="finished"),
    ],
)


def argo_health(manifest: dict[str, Any]) -> dict[str, str]:
    """Run the health check as Argo CD does: the object is a global, the answer a table."""
    lua = lupa.LuaRuntime(unpack_returned_tuples=True)
    lua.globals()["obj"] = lua.table_from(manifest, recursive=True)
    return dict(lua.execute((DEPLOY / "argocd" / "health.lua").read_text()))


def test_flux_tries_models_again_soon_since_they_can_not_wait_for_their_definitions() -> None:
    documents = yaml.safe_load_all((DEPLOY / "flux" / "tinkercloud.yaml").read_text())
    (models,) = (each for each in documents if each["kind"] == "Kustomization")

    assert "dependsOn" not in models["spec"]
    assert models["spec"]["retryInterval"] == "30s"


def flux_expressions(kind: str) -> dict[str, str]:
    """Return the expressions for a kind, in the order in which Flux asks them."""
    documents = yaml.safe_load_all((DEPLOY / "flux" / "tinkercloud.yaml").read_text())
    (kustomization,) = (each for each in documents if each["kind"] == "Kustomization")
    (found,) = (each for each in kustomization["spec"]["healthCheckExprs"] if each["kind"] == kind)
    return {name: found[name] for name in ("inProgress", "failed", "current")}


def flux_health(manifest: dict[str, Any]) -> str:
    """Return the first expression that holds."""
    environment = celpy.Environment()
    known = {name: json_to_cel(value) for name, value in manifest.items()}
    for name, expression in flux_expressions(manifest["kind"]).items():
        if environment.program(environment.compile(expression)).evaluate(known):
            return name
    return "inProgress"


@every_state
def test_argo_cd_sees_what_a_session_is_up_to(known: Observed, argo: str, flux: str) -> None:
    assert argo_health(seen(known))["status"] == argo


@every_state
def test_flux_sees_what_a_session_is_up_to(known: Observed, argo: str, flux: str) -> None:
    assert flux_health(seen(known)) == flux


def test_argo_cd_says_why_a_session_is_degraded() -> None:
    assert "tiny/llama" in argo_health(seen(IMPOSSIBLE))["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"status": {}},
        {"metadata": {"name": "one", "generation": 4}},
        {"metadata": {"name": "one", "generation": 3, "deletionTimestamp": "2026-11-20T12:00:00Z"}},
    ],
    ids=["never looked at", "specification changed", "being deleted"],
)
def test_what_the_operator_has_not_caught_up_with_is_progressing(change: dict[str, Any]) -> None:
    assert argo_health(seen(SERVING) | change)["status"] == "Progressing"


def test_flux_waits_for_the_operator_to_look_at_a_changed_specification() -> None:
    changed = seen(SERVING) | {"metadata": {"name": "one", "generation": 4}}

    assert flux_health(changed) == "inProgress"


@pytest.mark.parametrize(("generation", "health"), [(1, "current"), (2, "inProgress")])
def test_a_tenant_whose_sessions_wait_is_healthy_for_flux(generation: int, health: str) -> None:
    waiting = Claimant("one", ("", "one"), Amounts(), Amounts(sessions=1))
    manifest = {"metadata": {"name": "blue", "generation": 1}}
    status = tenant_status(manifest, TenantSpec(owners=["*"]), [waiting], NOW)
    assert [each.status for each in status.conditions] == ["False"]

    tenant = {
        "kind": "Tenant",
        "metadata": {"name": "blue", "generation": generation},
        "status": status.model_dump(by_alias=True, exclude_none=True, mode="json"),
    }

    assert flux_health(tenant) == health


def test_both_examples_restrict_the_namespace_and_argo_cd_leaves_the_size_of_pools_alone() -> None:
    argo = list(yaml.safe_load_all((DEPLOY / "argocd" / "applications.yaml").read_text()))
    flux = list(yaml.safe_load_all((DEPLOY / "flux" / "tinkercloud.yaml").read_text()))
    [of_argo] = [each["spec"]["syncPolicy"].get("managedNamespaceMetadata") for each in argo[1:2]]
    [of_flux] = [each["metadata"] for each in flux if each["kind"] == "Namespace"]
    ignored = argo[2]["spec"]["ignoreDifferences"]

    assert of_argo["labels"] == of_flux["labels"]
    assert ["/spec/pool/minClusters"] in [each.get("jsonPointers") for each in ignored]
    assert "minClusters" in Pool().model_dump(by_alias=True)


def test_the_kustomize_base_is_what_the_chart_renders() -> None:
    subprocess.run([sys.executable, "tools/render_deploy.py", "--check"], cwd=ROOT, check=True)


def test_the_kustomize_base_holds_no_key() -> None:
    documents = yaml.safe_load_all((DEPLOY / "kustomize" / "base" / "tinkercloud.yaml").read_text())

    assert "Secret" not in {each["kind"] for each in documents}


def kustomize(folder: str) -> list[dict[str, Any]]:
    """Build a folder with kubectl's kustomize."""
    command = [str(binary("kubectl")), "kustomize", str(DEPLOY / folder)]
    built = subprocess.check_output(command, text=True)
    return list(yaml.safe_load_all(built))


def test_an_overlay_chooses_images_and_sizes() -> None:
    found = kustomize("kustomize/overlays/example")
    images = {
        container["image"]
        for each in found
        if each["kind"] == "Deployment"
        for container in each["spec"]["template"]["spec"]["containers"]
    }
    sizes = {
        each["metadata"]["name"]: each["spec"]["resources"]["requests"]["storage"]
        for each in found
        if each["kind"] == "PersistentVolumeClaim"
    }

    assert images == {
        f"registry.example.com/ml/tinkercloud-api:{VERSION}",
        f"registry.example.com/ml/tinkercloud-operator:{VERSION}",
    }
    assert sizes["tinkercloud-checkpoints"] == "500Gi"
    assert {each["metadata"].get("namespace") for each in found} == {"tinkercloud", None}


def test_argo_cd_gets_the_health_check_of_both_kinds_and_nothing_else() -> None:
    (configuration,) = kustomize("argocd")
    text = (DEPLOY / "argocd" / "health.lua").read_text()

    assert configuration["metadata"]["name"] == "argocd-cm"
    assert configuration["data"] == {
        f"resource.customizations.health.tinkercloud.dev_{kind}": text
        for kind in ("BaseModel", "TrainingSession")
    }


def test_examples_of_argo_cd_and_flux_install_both_charts_in_this_order() -> None:
    argo = list(yaml.safe_load_all((DEPLOY / "argocd" / "applications.yaml").read_text()))
    flux = list(yaml.safe_load_all((DEPLOY / "flux" / "tinkercloud.yaml").read_text()))
    waves = {
        each["spec"]["source"]["path"]: int(
            each["metadata"]["annotations"]["argocd.argoproj.io/sync-wave"]
        )
        for each in argo
    }
    releases = {
        each["spec"]["chart"]["spec"]["chart"]: each["spec"].get("dependsOn")
        for each in flux
        if each["kind"] == "HelmRelease"
    }

    assert waves["charts/tinkercloud-crds"] < waves["charts/tinkercloud"] < waves["tinkercloud"]
    assert releases == {
        "charts/tinkercloud-crds": None,
        "charts/tinkercloud": [{"name": "tinkercloud-crds"}],
    }
