"""Examples of custom resources: each is acceptable, and says what it wants."""

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.structural import Part
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_operator.spec.resolved import ResolvedSpec, resolve
from tinkercloud_testing.charts import ROOT, objects

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


DOCKERFILE = ROOT / "Dockerfile"
TARGETS = {"api-server", "operator", "programs", "worker", "worker-cpu"}


def stages() -> dict[str, str]:
    """Return the text of each stage of the Dockerfile, by name, on one line for each command."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    parts = re.split(r"^FROM \S+ AS (\S+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("target", ["worker", "worker-cpu"])
def test_an_image_of_workers_trains_with_every_backend(target: str) -> None:
    commands = stages()[f"build-{target}"].splitlines()
    installing = [command for command in commands if "uv sync" in command]

    assert installing
    assert all("--extra megatron" in command for command in installing)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_an_image_runs_what_its_own_stage_has_built_and_not_as_root(target: str) -> None:
    stage = stages()[target]

    assert f"COPY --from=build-{target} /opt/tinkercloud /opt/tinkercloud" in stage
    assert "USER 65532:65532" in stage
    assert "ENTRYPOINT" in stage


def test_the_installation_page_builds_every_target() -> None:
    page = (ROOT / "docs" / "operate" / "installation.md").read_text()

    assert {target for _, target in re.findall(r"\b([\w-]+):([\w-]+)(?=[ ;])", page)} >= TARGETS


IGNORED = [
    line
    for line in (ROOT / ".dockerignore").read_text().splitlines()
    if line and not line.startswith("#")
]


@pytest.mark.parametrize("folder", [".git", ".venv", ".uv", ".run"])
def test_environments_and_state_are_not_sent_to_the_builder(folder: str) -> None:
    assert folder in IGNORED


def test_all_that_images_are_built_from_is_sent_to_the_builder() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    sources = [Path(name) for names in copied for name in names.split()]

    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert [
        source
        for source in sources
        if any(
            fnmatch(part, pattern.removeprefix("**/"))
            for pattern in IGNORED
            for part in source.parts
        )
    ] == []


def test_images_install_by_hash_and_their_base_may_be_named_by_digest() -> None:
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    installs = [
        line for line in re.split(r"\n|&&", text) if re.search(r"\b(pip install|uv sync)\b", line)
    ]

    assert installs
    for install in installs:
        is_ours = "--no-deps ./protocol ./worker_image" in install
        is_locked = "uv sync --frozen" in install
        assert is_ours or is_locked or "--require-hashes" in install, install
    bases = set(re.findall(r"^FROM (\S+)", text, re.MULTILINE))
    assert bases == {"${BASE}", "workspace", "runtime"}


def test_the_installer_and_the_images_use_one_version_of_uv_whose_hashes_are_known() -> None:
    wanted = (ROOT / "tools" / "uv-requirements.txt").read_text()

    assert len(re.findall(r"^uv==[0-9.]+ ", wanted, re.MULTILINE)) == 1
    assert len(re.findall(r"^    --hash=sha256:[0-9a-f]{64}", wanted, re.MULTILINE)) > 1
    for path in [DOCKERFILE, ROOT / "tools" / "install.sh"]:
        assert "tools/uv-requirements.txt" in path.read_text()


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
