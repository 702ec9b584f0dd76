"""Examples of custom resources: each is acceptable, and says what it wants."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.structural import Part
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_operator.spec.resolved import ResolvedSpec, resolve
from tinkercloud_testing.resources.charts import ROOT, objects

EXAMPLES = sorted((ROOT / "crds" / "examples").glob("*.yaml"))
BASE_MODELS = [path for path in EXAMPLES if "kind: BaseModel" in path.read_text()]
SESSIONS = [path for path in EXAMPLES if "kind: TrainingSession" in path.read_text()]
MODELS: dict[str, type[Part]] = {"BaseModel": BaseModelSpec, "TrainingSession": TrainingSessionSpec}


def read(path: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = yaml.safe_load(path.read_text())
    return found


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_only_fields_that_exist(path: Path) -> None:
    found = read(path)

    spec = MODELS[str(found["kind"])].model_validate(found["spec"])

    assert spec.model_dump(mode="json", by_alias=True, exclude_unset=True) == found["spec"]


@pytest.mark.parametrize("path", BASE_MODELS, ids=lambda path: path.stem)
def test_an_example_can_be_offered_by_the_chart(path: Path, tmp_path: Path) -> None:
    found = read(path)
    values = {"baseModels": [{"name": found["metadata"]["name"], "spec": found["spec"]}]}
    (tmp_path / "values.json").write_text(json.dumps(values))

    rendered = objects("--values", str(tmp_path / "values.json"))

    assert [each["spec"] for each in rendered if each["kind"] == "BaseModel"] == [found["spec"]]


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("smollm2-135m-cpu", 0),
        ("qwen2.5-0.5b-one-gpu", 1),
        ("qwen3-8b-one-node", 8),
        ("qwen2.5-72b-many-nodes", 48),
    ],
)
def test_a_session_of_an_example_asks_for_the_gpus_that_its_first_lines_say(
    name: str, gpus: int
) -> None:
    spec = BaseModelSpec.model_validate(read(ROOT / "crds" / "examples" / f"{name}.yaml")["spec"])
    session = TrainingSessionSpec(base_model=spec.model_name, owner="somebody")

    shape = resolve(session, spec, 0)

    assert isinstance(shape, ResolvedSpec)
    assert shape.gpus == gpus


@pytest.mark.parametrize("path", BASE_MODELS, ids=lambda path: path.stem)
def test_sampler_pods_of_an_example_run_engines(path: Path) -> None:
    sampler = BaseModelSpec.model_validate(read(path)["spec"]).sampler

    assert (sampler.replicas > 0) == (sampler.engines is not None)


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_a_session_asks_for_a_model_that_an_example_offers(path: Path) -> None:
    offered = {read(each)["spec"]["modelName"] for each in BASE_MODELS}

    assert read(path)["spec"]["baseModel"] in offered


@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem)
def test_an_example_is_accepted_with_its_program(path: Path) -> None:
    offers = [BaseModelSpec.model_validate(read(each)["spec"]) for each in BASE_MODELS]
    session = TrainingSessionSpec.model_validate(read(path)["spec"])
    [offer] = [each for each in offers if each.model_name == session.base_model]

    assert isinstance(resolve(session, offer, 0), ResolvedSpec)


def test_the_page_about_programs_shows_the_example() -> None:
    example = (ROOT / "crds" / "examples" / "program.yaml").read_text()
    page = (ROOT / "docs" / "operate" / "programs.md").read_text()

    assert example.partition("\n")[2] in page


@pytest.mark.parametrize("path", BASE_MODELS, ids=lambda path: path.stem)
def test_the_head_of_an_example_has_no_cuda_and_needs_no_gpu_node(path: Path) -> None:
    spec = BaseModelSpec.model_validate(read(path)["spec"])

    placed = spec.placement.of_role(spec.head.placement)

    assert spec.head.image.startswith("tinkercloud-worker-cpu:")
    assert placed.tolerations == []
    assert placed.node_selector == {}


@pytest.mark.parametrize("path", BASE_MODELS, ids=lambda path: path.stem)
def test_an_example_pins_the_weights_that_it_downloads_from_the_hub(path: Path) -> None:
    source = BaseModelSpec.model_validate(read(path)["spec"]).source

    assert source.hub is None or re.fullmatch("[0-9a-f]{40}", source.revision or "")


def test_ranks_of_an_example_on_several_gpu_nodes_have_a_fast_network() -> None:
    for path in BASE_MODELS:
        trainer = BaseModelSpec.model_validate(read(path)["spec"]).trainer
        names = {each.name for each in trainer.extended_resources}
        is_on_many_nodes = trainer.replicas > 1 and trainer.gpus_per_replica >= 8
        assert ({"vpc.amazonaws.com/efa", "hugepages-2Mi"} <= names) == is_on_many_nodes
