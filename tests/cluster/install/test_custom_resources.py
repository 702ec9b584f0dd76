"""The custom resources on a real API server: rules, bounds, defaults, columns."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.generate import FOLDERS, KINDS, MAX_BYTES, Kind, definition, render
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_testing.cluster.kube_api.client import Cluster, KubectlFailed
from tinkercloud_testing.resource_rules import RULES, SINGLE_VALUED
from tinkercloud_testing.resource_rules.bounds import AT_THE_BOUND
from tinkercloud_testing.resource_rules.rule import Rule
from tinkercloud_testing.resource_rules.updates import PATHS, RANKS, RUNS
from tinkercloud_testing.resources.sessions import SAMPLERS, TRAINERS, Json
from tinkercloud_testing.resources.sessions import a_base_model_manifest as base_model
from tinkercloud_testing.resources.sessions import a_session_manifest as session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CRDS = Path(__file__).parents[3] / "crds"
EXAMPLES = sorted((CRDS / "examples").glob("*.yaml"))


def cases(attribute: str) -> list[Any]:
    return [
        pytest.param(rule, manifest, id=f"{rule.path or 'metadata'} {index} {title}")
        for index, rule in enumerate(RULES)
        for title, manifest in getattr(rule, attribute).items()
    ]


def rules_of(kind: Kind) -> Iterator[tuple[str, str, str]]:
    """Yield kind, path and message of every CEL rule of a definition."""

    def below(schema: Json, path: str) -> Iterator[tuple[str, str, str]]:
        for rule in schema.get("x-kubernetes-validations", []):
            yield kind.kind, path, rule["message"]
        for name, child in schema.get("properties", {}).items():
            yield from below(child, f"{path}.{name}".removeprefix("."))

    [version] = definition(kind)["spec"]["versions"]
    yield from below(version["schema"]["openAPIV3Schema"], "")


def files_of(kind: Kind) -> list[Path]:
    return [folder / f"tinkercloud.dev_{kind.plural}.yaml" for folder in FOLDERS]


@pytest.fixture(scope="module")
def crds(cluster: Cluster) -> Cluster:
    """Install the definitions of our resources and return the cluster."""
    for kind in KINDS:
        cluster.apply_text(render(kind))
        name = f"customresourcedefinition/{kind.plural}.tinkercloud.dev"
        cluster.wait_for(name, "condition=Established")
    return cluster


@pytest.fixture
def namespace(crds: Cluster) -> Iterator[str]:
    with crds.a_namespace("crds") as name:
        yield name


@pytest.fixture(scope="module")
def shared_namespace(crds: Cluster) -> Iterator[str]:
    """Return a namespace for objects that are never stored."""
    with crds.a_namespace("crds") as name:
        yield name


def write(cluster: Cluster, manifest: Json, namespace: str, *options: str) -> Json:
    """Create an object, or replace it if an option says so; return the stored object."""
    verb, *rest = options or ("create",)
    where = (f"--namespace={namespace}", "--output=json", "--filename=-")
    placed = {**manifest, "metadata": {**manifest["metadata"], "namespace": namespace}}
    stored: Json = json.loads(cluster.kubectl(verb, *where, *rest, stdin=json.dumps(placed)))
    return stored


def attempt(cluster: Cluster, rule: Rule, manifest: Json, namespace: str) -> Json:
    if rule.before is None:
        return write(cluster, manifest, namespace, "create", "--dry-run=server")
    write(cluster, rule.before, namespace)
    return write(cluster, manifest, namespace, "replace")


@pytest.fixture
def room(request: pytest.FixtureRequest, rule: Rule) -> str:
    """Return the namespace of a case: its own if the case needs an existing object."""
    name: str = request.getfixturevalue("shared_namespace" if rule.before is None else "namespace")
    return name


@pytest.mark.parametrize(("rule", "manifest"), cases("accepted"))
def test_objects_that_satisfy_a_rule_are_accepted(
    crds: Cluster, room: str, rule: Rule, manifest: Json
) -> None:
    stored = attempt(crds, rule, manifest, room)

    assert stored["kind"] == manifest["kind"]


@pytest.mark.parametrize(("rule", "manifest"), cases("refused"))
def test_objects_that_violate_a_rule_are_rejected_with_the_field(
    crds: Cluster, room: str, rule: Rule, manifest: Json
) -> None:
    refused = re.escape(f"{rule.path}: ") + ".*" + re.escape(rule.message)

    with pytest.raises(KubectlFailed, match=refused):
        attempt(crds, rule, manifest, room)


@pytest.mark.parametrize("name", ["modelId", "lora", "restoreFrom", "queueName"])
def test_immutable_fields_of_a_session_cannot_be_removed(
    crds: Cluster, namespace: str, name: str
) -> None:
    began_with: Json = {
        "modelId": RUNS[0],
        "lora": RANKS[0],
        "restoreFrom": PATHS[0],
        "queueName": "q",
    }
    write(crds, session(**began_with), namespace)

    with pytest.raises(KubectlFailed, match=f"{name}: cannot be added or removed after creation"):
        write(crds, session(**began_with | {name: None}), namespace, "replace")


def test_every_rule_of_the_definitions_has_three_cases_of_each_sort() -> None:
    expected = {(rule.kind, rule.path, rule.message) for rule in RULES}
    fewest = min(len(found) for rule in RULES for found in (rule.accepted, rule.refused))

    assert expected | SINGLE_VALUED == {rule for kind in KINDS for rule in rules_of(kind)}
    assert fewest >= 3


@pytest.mark.parametrize("path", AT_THE_BOUND)
def test_a_value_at_its_bound_is_accepted_and_one_beyond_is_rejected(
    crds: Cluster, shared_namespace: str, path: str
) -> None:
    build, within, beyond = AT_THE_BOUND[path]

    write(crds, build(**within), shared_namespace, "create", "--dry-run=server")

    with pytest.raises(KubectlFailed, match=re.escape(path) + "[:[]"):
        write(crds, build(**beyond), shared_namespace, "create", "--dry-run=server")


@pytest.mark.parametrize("name", ["image", "volumes", "nodeName", "nodeSelector", "serviceAccount"])
def test_a_session_cannot_set_fields_of_its_base_model(
    crds: Cluster, shared_namespace: str, name: str
) -> None:
    with pytest.raises(KubectlFailed, match=f'unknown field "spec.{name}"'):
        write(crds, session(**{name: "x"}), shared_namespace, "create", "--dry-run=server")


@pytest.mark.parametrize("kind", ["trainer", "sampler"])
@pytest.mark.parametrize("name", ["extendedResources", "environment", "resources"])
def test_a_session_cannot_set_the_resources_of_its_pods(
    crds: Cluster, shared_namespace: str, kind: str, name: str
) -> None:
    asked: Json = {kind: {name: []}}

    with pytest.raises(KubectlFailed, match=f'unknown field "spec.{kind}.{name}"'):
        write(crds, session(**asked), shared_namespace, "create", "--dry-run=server")


def test_the_api_server_applies_the_same_defaults_as_the_models(
    crds: Cluster, shared_namespace: str
) -> None:
    dry = ("create", "--dry-run=server")

    offered = write(crds, base_model(), shared_namespace, *dry)["spec"]
    asked = write(crds, session(lora={}), shared_namespace, *dry)["spec"]

    as_read = BaseModelSpec.model_validate(base_model()["spec"])
    assert offered == as_read.model_dump(mode="json", by_alias=True, exclude_none=True)
    as_read_too = TrainingSessionSpec.model_validate(session(lora={})["spec"])
    assert asked == as_read_too.model_dump(by_alias=True, exclude_none=True)
    assert asked["lora"]["rank"] == 32


def test_status_and_spec_are_written_separately(crds: Cluster, namespace: str) -> None:
    write(crds, session() | {"status": {"phase": "Ready"}}, namespace)

    assert "status" not in crds.get("tsess", "one", namespace)

    crds.patch_status("tsess", "one", {"phase": "Loading"}, namespace)
    write(crds, session(suspend=True), namespace, "replace")
    stored = crds.get("tsess", "one", namespace)
    assert stored["status"] == {"phase": "Loading"}
    assert stored["spec"]["suspend"] is True
    assert stored["metadata"]["generation"] == 2


def a_condition(kind: str, status: str = "True") -> Json:
    moment = "2026-01-01T12:00:00Z"
    return {"type": kind, "status": status, "reason": kind, "lastTransitionTime": moment}


def apply_conditions(cluster: Cluster, namespace: str, manager: str, *conditions: Json) -> None:
    manifest = session(namespace=namespace) | {"status": {"conditions": conditions}}
    del manifest["spec"]
    options = ("--server-side", "--subresource=status", f"--field-manager={manager}")
    cluster.kubectl("apply", *options, "--filename=-", stdin=json.dumps(manifest))


def test_two_field_managers_share_the_list_of_conditions(crds: Cluster, namespace: str) -> None:
    write(crds, session(), namespace)

    apply_conditions(crds, namespace, "operator", a_condition("Accepted"), a_condition("Ready"))
    apply_conditions(crds, namespace, "another", a_condition("Audited"))
    apply_conditions(crds, namespace, "operator", a_condition("Ready", "False"))

    conditions = crds.get("tsess", "one", namespace)["status"]["conditions"]
    found = {condition["type"]: condition["status"] for condition in conditions}
    assert found == {"Ready": "False", "Audited": "True"}


def test_sessions_are_listed_as_the_documentation_shows(crds: Cluster, namespace: str) -> None:
    write(crds, session("ts-4f9c2a71-0"), namespace)
    workers = {"trainers": "2/2", "samplers": "1/1"}
    seen = {"phase": "Ready", "workers": workers, "gpus": 3, "conditions": [a_condition("Ready")]}
    crds.patch_status("tsess", "ts-4f9c2a71-0", seen, namespace)

    header, row = crds.kubectl("get", "trainingsessions", f"--namespace={namespace}").splitlines()

    assert " ".join(header.split()) == "NAME PHASE READY MODEL TRAINERS SAMPLERS GPUS POOL AGE"
    assert " ".join(row.split()[:-1]) == "ts-4f9c2a71-0 Ready True Qwen/Qwen3-8B 2/2 1/1 3"


def test_base_models_are_listed_with_their_choices(crds: Cluster, namespace: str) -> None:
    write(crds, base_model("qwen", trainer=TRAINERS, sampler=SAMPLERS), namespace)
    pool = {"clusterSummary": "1/2", "slotSummary": "5/16"}
    seen = {
        "liveSessions": 2,
        "gpus": 20,
        "pool": pool,
        "spares": {"summary": "1/1"},
        "conditions": [a_condition("Ready")],
    }
    crds.patch_status("bm", "qwen", seen, namespace)

    header, row = crds.kubectl("get", "basemodels", f"--namespace={namespace}").splitlines()

    assert header.split() == [
        *["NAME", "MODEL", "READY", "TRAINER", "SAMPLER"],
        *["SESSIONS", "CLUSTERS", "SLOTS", "SPARES", "GPUS", "AGE"],
    ]
    assert " ".join(row.split()[:-1]) == "qwen Qwen/Qwen3-8B True megatron sglang 2 1/2 5/16 1/1 20"


@pytest.mark.parametrize("asked", ["bm,tsess", "ml"])
def test_resources_are_found_by_short_name_and_category(
    crds: Cluster, namespace: str, asked: str
) -> None:
    write(crds, base_model("qwen"), namespace)
    write(crds, session("one"), namespace)

    found = crds.kubectl("get", asked, f"--namespace={namespace}", "--output=name").split()

    assert set(found) >= {"basemodel.tinkercloud.dev/qwen", "trainingsession.tinkercloud.dev/one"}


def test_deleting_everything_of_a_namespace_leaves_models_and_sessions(
    crds: Cluster, namespace: str
) -> None:
    write(crds, base_model("kept"), namespace)
    write(crds, session("kept"), namespace)

    crds.kubectl("delete", "all", "--all", f"--namespace={namespace}")

    where = (f"--namespace={namespace}", "--output=name")
    assert len(crds.kubectl("get", "bm/kept", "tsess/kept", *where).split()) == 2


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_applying_a_definition_again_changes_nothing(crds: Cluster, kind: Kind) -> None:
    name = f"{kind.plural}.tinkercloud.dev"
    before = crds.get("customresourcedefinition", name)

    crds.apply_text(render(kind))

    after = crds.get("customresourcedefinition", name)
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_the_files_are_small_and_match_the_generator(kind: Kind) -> None:
    in_folder, in_chart = (path.read_text() for path in files_of(kind))

    assert in_folder == in_chart == render(kind)
    assert len(in_folder.encode()) < MAX_BYTES < 128 << 10


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_accepted(crds: Cluster, namespace: str, path: Path) -> None:
    where = (f"--namespace={namespace}", "--filename=-")

    said = crds.kubectl("apply", "--server-side", *where, stdin=path.read_text())

    documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
    assert said.count("serverside-applied") == len(documents)
