"""The custom resources on a real API server: rules, bounds, defaults, columns."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import CustomObjectsApi
from kubernetes.client.exceptions import ApiException
from kubernetes.config import new_client_from_config

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.generate import FOLDERS, KINDS, MAX_BYTES, Kind, definition, render
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_testing.cluster.kube_api.client import Cluster
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


class Rejected(Exception):
    """The API server rejected an object; the message says why."""


@dataclass(frozen=True)
class Objects:
    """The objects of a namespace, by requests of our own: kubectl would take most of the time."""

    api: CustomObjectsApi
    namespace: str

    def write(self, manifest: Json, **options: str) -> Json:
        """Create an object, or with `dry_run` only check it; return the stored object.

        Raises:
            Rejected: it is invalid.
        """
        return self._sent(self.api.create_namespaced_custom_object, manifest, **options)

    def check(self, manifest: Json) -> Json:
        """Return an object as it would be stored.

        Raises:
            Rejected: it is invalid.
        """
        return self.write(manifest, dry_run="All")

    def replace(self, stored: Json, manifest: Json) -> Json:
        """Replace an object, and return the new one.

        Raises:
            Rejected: it is invalid.
        """
        version = {"resourceVersion": stored["metadata"]["resourceVersion"]}
        newer = {**manifest, "metadata": {**manifest["metadata"], **version}}
        name = stored["metadata"]["name"]
        return self._sent(self.api.replace_namespaced_custom_object, newer, name=name)

    def delete(self, stored: Json) -> None:
        """Delete an object."""
        where = self._of(stored) | {"name": stored["metadata"]["name"]}
        self.api.delete_namespaced_custom_object(**where)

    def _of(self, manifest: Json) -> dict[str, str]:
        group, version = manifest["apiVersion"].split("/")
        plurals = {kind.kind: kind.plural for kind in KINDS}
        plural = plurals[manifest["kind"]]
        return {"group": group, "version": version, "plural": plural, "namespace": self.namespace}

    def _sent(self, send: Callable[..., Any], manifest: Json, **options: str) -> Json:
        placed = {**manifest, "metadata": {**manifest["metadata"], "namespace": self.namespace}}
        try:
            stored: Json = send(
                **self._of(manifest), body=placed, field_validation="Strict", **options
            )
        except ApiException as error:
            if error.status not in {400, 422}:
                raise
            raise Rejected(json.loads(error.body or "{}")["message"]) from error
        return stored


@pytest.fixture(scope="module")
def objects(crds: Cluster) -> Iterator[Objects]:
    """Return the objects of a namespace that tests leave empty."""
    with (
        crds.a_namespace("crds") as name,
        new_client_from_config(str(crds.kubeconfig)) as client,
    ):
        yield Objects(CustomObjectsApi(client), name)


def apply(cluster: Cluster, manifest: Json, namespace: str) -> None:
    """Create an object, or change it."""
    cluster.apply({**manifest, "metadata": {**manifest["metadata"], "namespace": namespace}})


def attempt(objects: Objects, rule: Rule, manifest: Json) -> Json:
    if rule.before is None:
        return objects.check(manifest)
    before = objects.write(rule.before)
    try:
        return objects.replace(before, manifest)
    finally:
        objects.delete(before)


@pytest.mark.parametrize(("rule", "manifest"), cases("accepted"))
def test_objects_that_satisfy_a_rule_are_accepted(
    objects: Objects, rule: Rule, manifest: Json
) -> None:
    stored = attempt(objects, rule, manifest)

    assert stored["kind"] == manifest["kind"]


@pytest.mark.parametrize(("rule", "manifest"), cases("refused"))
def test_objects_that_violate_a_rule_are_rejected_with_the_field(
    objects: Objects, rule: Rule, manifest: Json
) -> None:
    refused = re.escape(f"{rule.path}: ") + ".*" + re.escape(rule.message)

    with pytest.raises(Rejected, match=refused):
        attempt(objects, rule, manifest)


@pytest.mark.parametrize("name", ["modelId", "lora", "restoreFrom", "queueName"])
def test_immutable_fields_of_a_session_cannot_be_removed(objects: Objects, name: str) -> None:
    began_with: Json = {
        "modelId": RUNS[0],
        "lora": RANKS[0],
        "restoreFrom": PATHS[0],
        "queueName": "q",
    }
    before = objects.write(session(**began_with))

    try:
        with pytest.raises(Rejected, match=f"{name}: cannot be added or removed after creation"):
            objects.replace(before, session(**began_with | {name: None}))
    finally:
        objects.delete(before)


def test_every_rule_of_the_definitions_has_three_cases_of_each_sort() -> None:
    expected = {(rule.kind, rule.path, rule.message) for rule in RULES}
    fewest = min(len(found) for rule in RULES for found in (rule.accepted, rule.refused))

    assert expected | SINGLE_VALUED == {rule for kind in KINDS for rule in rules_of(kind)}
    assert fewest >= 3


@pytest.mark.parametrize("path", AT_THE_BOUND)
def test_a_value_at_its_bound_is_accepted_and_one_beyond_is_rejected(
    objects: Objects, path: str
) -> None:
    build, within, beyond = AT_THE_BOUND[path]

    objects.check(build(**within))

    with pytest.raises(Rejected, match=re.escape(path) + "[:[]"):
        objects.check(build(**beyond))


@pytest.mark.parametrize("name", ["image", "volumes", "nodeName", "nodeSelector", "serviceAccount"])
def test_a_session_cannot_set_fields_of_its_base_model(objects: Objects, name: str) -> None:
    with pytest.raises(Rejected, match=f'unknown field "spec.{name}"'):
        objects.check(session(**{name: "x"}))


@pytest.mark.parametrize("kind", ["trainer", "sampler"])
@pytest.mark.parametrize("name", ["extendedResources", "environment", "resources"])
def test_a_session_cannot_set_the_resources_of_its_pods(
    objects: Objects, kind: str, name: str
) -> None:
    asked: Json = {kind: {name: []}}

    with pytest.raises(Rejected, match=f'unknown field "spec.{kind}.{name}"'):
        objects.check(session(**asked))


def test_the_api_server_applies_the_same_defaults_as_the_models(objects: Objects) -> None:
    offered = objects.check(base_model())["spec"]
    asked = objects.check(session(lora={}))["spec"]

    as_read = BaseModelSpec.model_validate(base_model()["spec"])
    assert offered == as_read.model_dump(mode="json", by_alias=True, exclude_none=True)
    as_read_too = TrainingSessionSpec.model_validate(session(lora={})["spec"])
    assert asked == as_read_too.model_dump(by_alias=True, exclude_none=True)
    assert asked["lora"]["rank"] == 32


def test_status_and_spec_are_written_separately(crds: Cluster, objects: Objects) -> None:
    stored = objects.write(session() | {"status": {"phase": "Ready"}})
    try:
        assert "status" not in stored

        crds.patch_status("tsess", "one", {"phase": "Loading"}, objects.namespace)
        current = crds.get("tsess", "one", objects.namespace)
        stored = objects.replace(current, session(suspend=True) | {"status": {"phase": "Ready"}})
    finally:
        objects.delete(stored)

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
    apply(crds, session(), namespace)

    apply_conditions(crds, namespace, "operator", a_condition("Accepted"), a_condition("Ready"))
    apply_conditions(crds, namespace, "another", a_condition("Audited"))
    apply_conditions(crds, namespace, "operator", a_condition("Ready", "False"))

    conditions = crds.get("tsess", "one", namespace)["status"]["conditions"]
    found = {condition["type"]: condition["status"] for condition in conditions}
    assert found == {"Ready": "False", "Audited": "True"}


def test_sessions_are_listed_as_the_documentation_shows(crds: Cluster, namespace: str) -> None:
    apply(crds, session("ts-4f9c2a71-0"), namespace)
    workers = {"trainers": "2/2", "samplers": "1/1"}
    seen = {"phase": "Ready", "workers": workers, "gpus": 3, "conditions": [a_condition("Ready")]}
    crds.patch_status("tsess", "ts-4f9c2a71-0", seen, namespace)

    header, row = crds.kubectl("get", "trainingsessions", f"--namespace={namespace}").splitlines()

    assert " ".join(header.split()) == "NAME PHASE READY MODEL TRAINERS SAMPLERS GPUS POOL AGE"
    assert " ".join(row.split()[:-1]) == "ts-4f9c2a71-0 Ready True Qwen/Qwen3-8B 2/2 1/1 3"


def test_base_models_are_listed_with_their_choices(crds: Cluster, namespace: str) -> None:
    apply(crds, base_model("qwen", trainer=TRAINERS, sampler=SAMPLERS), namespace)
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
    apply(crds, base_model("qwen"), namespace)
    apply(crds, session("one"), namespace)

    found = crds.kubectl("get", asked, f"--namespace={namespace}", "--output=name").split()

    assert set(found) >= {"basemodel.tinkercloud.dev/qwen", "trainingsession.tinkercloud.dev/one"}


def test_deleting_everything_of_a_namespace_leaves_models_and_sessions(
    crds: Cluster, namespace: str
) -> None:
    apply(crds, base_model("kept"), namespace)
    apply(crds, session("kept"), namespace)

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
