"""From `helm install` to `helm uninstall`: the SDK trains a real model in real pods.

The tests depend on each other: each continues from the state that the previous one left.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import httpx
import pytest
import tinker
import yaml
from tinker import types
from transformers import AutoTokenizer

from tinkercloud_testing.clients.sdk_steps import a_text
from tinkercloud_testing.cluster.controllers.kuberay import KubeRay
from tinkercloud_testing.cluster.controllers.training_sessions import a_session
from tinkercloud_testing.cluster.image_build.program_images import (
    ARE_ASSEMBLED,
    TARGETS,
    layout_folder,
    program_image,
)
from tinkercloud_testing.cluster.installation import (
    ALL_KINDS,
    RELEASE,
    START_SECONDS,
    Installation,
    a_secret,
    an_installation,
    make_volumes,
    values_of_one_node,
)
from tinkercloud_testing.cluster.kube_api.client import Cluster
from tinkercloud_testing.cluster.kube_api.existing import ExistingNodes
from tinkercloud_testing.cluster.nodes.node import HOST_ADDRESS, RealNode
from tinkercloud_testing.cluster.releases import UNPUBLISHED, Release, a_registry, publish
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.resources.charts import ROOT
from tinkercloud_testing.small_models.models import save, smollm2, tiny_llama
from tinkercloud_testing.storage.buckets import a_bucket

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def smollm2_model(release: Release) -> dict[str, Any]:
    return {
        "name": "smollm2-135m",
        "spec": {
            "modelName": MODEL,
            "source": {"volume": {"claimName": "models", "path": Path(MODEL).name}},
            "maxContextLength": 2048,
            "head": {
                "image": release.image("worker"),
                "resources": {"cpu": "500m", "memory": "6Gi"},
            },
            "trainer": {"dtype": "float32"},
            "programs": {
                "images": [
                    release.image(name) for name in ("programs", "recipes") if name in TARGETS
                ],
                "backoffLimit": 0,
                "resources": {"cpu": "250m", "memory": "2Gi", "scratch": "1Gi"},
            },
        },
    }


RLVE = {
    "enabled": True,
    "environment_list": ["Division"],
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 2,
    "rollout_max_response_len": 8,
    "num_rollout": 2,
    "save_every_steps": 1,
    "use_dynamic_sampling_filter": False,
}
"""Few short responses. Whether a step has any to learn from is not what these tests are about."""
RECIPE = {
    "module": "tinker_cookbook.recipes.math_rl.train",
    "args": [
        "env=arithmetic",
        "loss_fn=importance_sampling",
        f"model_name={MODEL}",
        "lora_rank=8",
        "renderer_name=role_colon",
        "groups_per_batch=2",
        "group_size=2",
        "max_tokens=8",
        "max_steps=2",
        "eval_every=0",
        "log_path=/program/log",
    ],
    "env": [{"name": "WANDB_MODE", "value": "disabled"}],
    "apiKeySecret": {"name": "research-key"},
}
TINY_MODEL = "tiny/llama"


@pytest.fixture(scope="module")
def release(
    real_node: RealNode | ExistingNodes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Release]:
    """Publish the images and the charts in a registry; assembled images are only loaded."""
    images = [program_image(name) for name in TARGETS]
    real_node.load(*images)
    if ARE_ASSEMBLED or isinstance(real_node, ExistingNodes):
        yield UNPUBLISHED
        return
    with a_registry(tmp_path_factory.mktemp("registry")):
        layout = f"--layout={layout_folder()}"
        yield publish(ROOT, layout, "--targets", *TARGETS.values())


@pytest.fixture(scope="module")
def installation(
    cluster: Cluster,
    kuberay: KubeRay,
    release: Release,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Installation]:
    """Install the service with one real model."""
    folder = tmp_path_factory.mktemp("installation")
    source = smollm2()
    models = make_volumes(folder)
    shutil.copytree(source, models / source.name)
    for path in models.glob("*/*"):
        path.chmod(0o644)
    values = values_of_one_node(smollm2_model(release)) | {"test": {"baseModel": TINY_MODEL}}
    with an_installation(cluster, folder, values, release) as installed:
        yield installed


@pytest.mark.skipif(ARE_ASSEMBLED, reason="needs images of the Dockerfile: make e2e")
def test_every_image_of_the_service_was_pulled_from_a_registry_by_digest(
    installation: Installation, own_node: RealNode
) -> None:
    pods = json.loads(installation.kubectl("get", "pods", "--output=json"))["items"]

    images = {each["image"] for pod in pods for each in pod["spec"]["containers"]}

    assert images == {installation.source.image(name) for name in ("api-server", "operator")}
    assert all(re.fullmatch(r"[^@:]+:5000/[^@:]+@sha256:[0-9a-f]{64}", image) for image in images)


@pytest.fixture
def tiny_model_in_a_bucket(
    installation: Installation, own_node: RealNode, tmp_path: Path
) -> Iterator[None]:
    """Serve a tiny model that pods download from an object store on this machine."""
    del own_node
    with a_bucket(HOST_ADDRESS) as bucket:
        uri = bucket.hold(save(tiny_llama(), tmp_path / "tiny"), "tiny")
        secret, model = "bucket", "tiny-llama"
        installation.cluster.apply(
            a_secret(secret, installation.namespace, bucket.environment),
            {
                "apiVersion": "tinkercloud.dev/v1alpha1",
                "kind": "BaseModel",
                "metadata": {"name": model, "namespace": installation.namespace},
                "spec": {
                    "modelName": TINY_MODEL,
                    "source": {"uri": uri, "secretName": secret},
                    "maxContextLength": 512,
                    "head": {
                        "image": installation.source.image("worker"),
                        "resources": {"cpu": "250m", "memory": "3Gi"},
                    },
                    "trainer": {"dtype": "float32"},
                },
            },
        )
        with installation.client() as client:
            wait_until(lambda: TINY_MODEL in served_by(client), "the tiny model on offer")
        yield
        installation.kubectl("delete", f"secret/{secret}", f"basemodel/{model}")


def served_by(client: tinker.ServiceClient) -> list[str | None]:
    return [model.model_name for model in client.get_server_capabilities().supported_models]


@dataclass
class Story:
    """State that later tests use."""

    training: tinker.TrainingClient | None = None
    path: str = ""
    loss: float = float("nan")


@pytest.fixture(scope="module")
def story() -> Story:
    return Story()


def pairs() -> list[types.Datum]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    texts = ["The capital of France is Paris.", "Water is made of hydrogen and oxygen."]
    encoded = [tokenizer.encode(text) for text in texts]
    return [a_text(tokens, weights=[1.0] * (len(tokens) - 1)) for tokens in encoded]


def loss_of(training: tinker.TrainingClient, data: list[types.Datum]) -> float:
    output = training.forward(data, "cross_entropy").result()
    return float(output.metrics["loss:sum"])


def test_the_sdk_trains_a_real_model_through_the_service(
    installation: Installation, story: Story
) -> None:
    client = installation.client()

    story.training = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
    data = pairs()
    before = loss_of(story.training, data)
    for _ in range(3):
        story.training.forward_backward(data, "cross_entropy").result()
        story.training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    story.loss = loss_of(story.training, data)

    assert story.loss < before


def test_clients_load_the_tokenizer_from_the_service(installation: Installation) -> None:
    url = f"{installation.url}/hf/{MODEL}/resolve/main/tokenizer.json"

    with urlopen(url, timeout=60) as response:
        served = response.read()

    assert served == (smollm2() / "tokenizer.json").read_bytes()


def test_kubectl_shows_the_session(installation: Installation) -> None:
    [row] = installation.kubectl("get", "tsess", "--no-headers").splitlines()

    assert row.split()[1:6] == ["Ready", "True", MODEL, "1/1", "1/1"]


def test_trained_weights_are_sampled_and_saved(installation: Installation, story: Story) -> None:
    assert story.training is not None
    sampler = story.training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([1, 2, 3])

    sampled = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, seed=1)).result()
    story.path = story.training.save_state("learnt").result().path

    assert len(sampled.sequences[0].tokens) == 4
    assert story.path.endswith("/weights/learnt")


def test_an_upgrade_does_not_disturb_a_training_session(
    installation: Installation, story: Story
) -> None:
    assert story.training is not None
    selector = "--selector=tinkercloud.dev/session"
    pods = installation.kubectl("get", "pods", selector, "--output=name")
    changed = yaml.safe_load(installation.values.read_text())
    changed["apiServer"]["podAnnotations"] = {"upgraded": "yes"}
    changed["operator"]["podAnnotations"] = {"upgraded": "yes"}
    changed["baseModels"][0]["spec"]["head"]["resources"]["cpu"] = "400m"
    installation.values.write_text(yaml.safe_dump(changed))

    pending = story.training.forward(pairs(), "cross_entropy")
    chart = installation.source.charts["tinkercloud"]
    installation.helm("upgrade", RELEASE, *chart, f"--values={installation.values}")
    for deployment in ("api", "operator"):
        rolled = f"deployment/{RELEASE}-{deployment}"
        installation.kubectl("rollout", "status", rolled, f"--timeout={START_SECONDS}s")

    assert float(pending.result().metrics["loss:sum"]) == story.loss
    assert loss_of(story.training, pairs()) == story.loss
    assert installation.kubectl("get", "pods", selector, "--output=name") == pods


def test_a_deleted_session_leaves_only_its_checkpoint(
    installation: Installation,
) -> None:
    [session] = installation.sessions()

    installation.delete_session(session["metadata"]["name"])

    kept = installation.values.parent / "checkpoints"
    assert list(kept.glob("runs/*/weights/learnt/manifest.json"))


def test_a_new_session_resumes_from_the_checkpoint(
    installation: Installation, story: Story
) -> None:
    client = installation.client()

    training = client.create_training_client_from_state(story.path).result()

    assert loss_of(training, pairs()) == story.loss


def wait_until_the_program_succeeded(installation: Installation, session: str) -> None:
    def program() -> dict[str, Any]:
        where = ("trainingsession", session, installation.namespace)
        status: dict[str, Any] = installation.cluster.get(*where).get("status", {})
        return dict(status.get("program", {}))

    is_over = {"Succeeded", "Failed"}.__contains__
    wait_until(lambda: is_over(program().get("phase")), "the program's end", START_SECONDS)
    assert program()["phase"] == "Succeeded", program()


@pytest.mark.long
def test_rlve_runs_in_a_job_that_create_model_started(installation: Installation) -> None:
    known = {session["metadata"]["name"] for session in installation.sessions()}
    asked = {"base_model": MODEL, "lora_config": {"rank": 8}, "rlve_config": RLVE}
    headers = {"X-API-Key": installation.key}

    with httpx.Client(base_url=f"{installation.url}/api/v1/", headers=headers, timeout=60) as api:

        def program() -> dict[str, Any]:
            [only] = api.get("programs").json()["programs"]
            return dict(only)

        api.post("create_model", json=asked).raise_for_status()
        wait_until(lambda: len(installation.sessions()) > len(known), "a session", START_SECONDS)
        [name] = {s["metadata"]["name"] for s in installation.sessions()} - known
        wait_until_the_program_succeeded(installation, name)
        wait_until(lambda: program()["phase"] == "Succeeded", "the end in the catalog")
        log = api.get(f"programs/{program()['program_id']}/logs").json()["text"]
        progress = program()["progress"]

    assert progress["step"] == 2
    assert progress["environments"]["Division"]["prompts"] == 4
    rest = installation.client().create_rest_client()
    saved = {found.tinker_path for found in rest.list_user_checkpoints().result().checkpoints}
    assert progress["checkpoint"] in saved
    assert log == installation.kubectl("logs", f"job/{name}-program")
    installation.delete_session(name)


@pytest.mark.long
def test_a_declared_session_runs_a_recipe_of_the_cookbook(installation: Installation) -> None:
    secret = a_secret("research-key", installation.namespace, {"apiKey": installation.key})
    session = a_session(
        installation.namespace,
        "recipe",
        baseModel=MODEL,
        owner="bootstrap",
        lora={"rank": 8},
        program={
            **RECIPE,
            "image": installation.source.image("programs" if ARE_ASSEMBLED else "recipes"),
        },
    )

    installation.cluster.apply(secret, session)

    wait_until_the_program_succeeded(installation, "recipe")
    rest = installation.client().create_rest_client()
    saved = [found.tinker_path for found in rest.list_user_checkpoints().result().checkpoints]
    assert [path for path in saved if path.endswith("/weights/final")]
    assert "Saved checkpoints" in installation.kubectl("logs", "job/recipe-program")
    installation.delete_session("recipe")
    installation.kubectl("delete", "secret/research-key")


def test_helm_test_trains_a_downloaded_model_in_a_pod_and_ends_its_session(
    installation: Installation, tiny_model_in_a_bucket: None
) -> None:
    before = {session["metadata"]["uid"] for session in installation.sessions()}

    said = installation.helm("test", RELEASE, "--logs", f"--timeout={START_SECONDS}s")

    assert re.search(r"loss: [\d.]+ -> [\d.]+", said)
    wait_until(
        lambda: {session["metadata"]["uid"] for session in installation.sessions()} == before,
        "the test's session gone",
        START_SECONDS,
    )
    # Helm keeps the pod and its log after the release is uninstalled.
    installation.kubectl("delete", "pod", f"{RELEASE}-test")


def test_uninstalling_leaves_neither_finalizers_nor_orphans(installation: Installation) -> None:
    installation.helm("uninstall", RELEASE, "--wait", f"--timeout={START_SECONDS}s")

    def left() -> list[str]:
        found = installation.kubectl("get", ALL_KINDS, "--output=json")
        return [
            f"{item['kind']}/{item['metadata']['name']}"
            for item in json.loads(found)["items"]
            if item["metadata"]["name"] != "kube-root-ca.crt" and not is_kept(item)
        ]

    wait_until(lambda: not left(), f"nothing left: {left()}", START_SECONDS)


def is_kept(item: dict[str, Any]) -> bool:
    """Whether Helm itself keeps an object: the record of the other release."""
    return str(item["metadata"]["name"]).startswith("sh.helm.release.v1.tinkercloud-crds")
