"""`tinkercloud plan`, as people and scripts use it."""

import hashlib
import json
import math
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_crds.pods.shapes import Parallelism
from tinkercloud_crds.training_session import TrainingSessionSpec
from tinkercloud_operator.children.engines import sampler_config
from tinkercloud_operator.children.raycluster import ray_cluster
from tinkercloud_operator.children.support_objects import head_config
from tinkercloud_operator.spec.resolved import Devices
from tinkercloud_planning import families
from tinkercloud_planning.gpus import parse
from tinkercloud_planning.plan import plan as make_plan
from tinkercloud_testing.resources.sessions import a_build, a_session
from tinkercloud_testing.serving.plan_command import (
    CONFIGS,
    NO_HUB,
    folder_with,
    planned,
    run,
    run_with_hub,
)

pytestmark = pytest.mark.timeout(300)

PAGE = Path(__file__).parents[3] / "docs" / "operate" / "planning.md"
EXAMPLES = Path(__file__).parents[3] / "crds" / "examples"


@pytest.fixture
def qwen3_8b(tmp_path: Path) -> str:
    return folder_with(CONFIGS["Qwen/Qwen3-8B"], tmp_path / "qwen3-8b")


@pytest.fixture
def hub() -> Iterator[str]:
    """A hub that has one file: the configuration of `acme/tiny`."""
    content = json.dumps(CONFIGS["Qwen/Qwen2.5-0.5B"]).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            known = self.path == "/acme/tiny/resolve/main/config.json"
            self.send_response(200 if known else 404)
            self.send_header("ETag", hashlib.sha1(content, usedforsecurity=False).hexdigest())
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(content)

        def log_message(self, *_arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_the_plan_is_printed_with_its_reasons_and_its_memory(qwen3_8b: str) -> None:
    result = run(qwen3_8b, "--gpus", "8xH100", "--lora-rank", "16")

    assert result.exit_code == 0
    assert "8.19B parameters on 8xH100-80, sequences of 32768 tokens, LoRA rank 16" in result.output
    assert "4 train, 4 sample" in result.output
    for part in ("tensor", "maxBatchTokens", "weights", "activations", "kv cache", "reserve"):
        assert part in result.output


def test_the_page_shows_what_is_printed(tmp_path: Path) -> None:
    shown = PAGE.read_text().split("--gpus 8xH100\n", 1)[1].split("\n```", 1)[0]

    printed = run(folder_with(CONFIGS["Qwen/Qwen2.5-72B"], tmp_path / "m"), "--gpus", "8xH100")

    assert [line.rstrip() for line in printed.output.splitlines()] == shown.splitlines()


def test_json_is_a_base_model_whose_sessions_train_and_sample_as_planned(qwen3_8b: str) -> None:
    manifest = planned(qwen3_8b, "--gpus", "16xH100", "--sequence-length", "8192")

    spec = BaseModelSpec.model_validate(manifest["spec"])
    trainer, sampler = spec.trainer, spec.sampler
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("BaseModel", "qwen3-8b")
    assert (spec.max_context_length, spec.limits.max_lora_rank) == (8192, 32)
    assert (trainer.backend, trainer.replicas, trainer.gpus_per_replica) == ("megatron", 1, 8)
    assert (sampler.backend, sampler.replicas * sampler.gpus_per_replica) == ("sglang", 8)
    build = a_build(spec, a_session(baseModel=spec.model_name))
    assert len(sampler_config(build).inference.urls) == sampler.replicas
    assert not build.resolved.head_computes


@pytest.mark.parametrize("gpus", ["8xH100", "1xB200"])
def test_a_planned_base_model_accepts_the_taint_of_gpu_nodes_as_the_examples_do(
    gpus: str, qwen3_8b: str
) -> None:
    example = yaml.safe_load((EXAMPLES / "qwen3-8b-one-node.yaml").read_text())

    manifest = planned(qwen3_8b, "--gpus", gpus, "--sequence-length", "8192")

    assert manifest["spec"]["placement"] == example["spec"]["placement"]
    assert BaseModelSpec.model_validate(manifest["spec"]).placement.tolerations


def test_a_model_that_megatron_refuses_is_planned_for_the_torch_trainer_with_the_reason(
    tmp_path: Path,
) -> None:
    folder = folder_with(CONFIGS["mistralai/Mistral-7B-v0.1"], tmp_path / "mistral")

    spec = BaseModelSpec.model_validate(planned(folder, "--gpus", "8xH100")["spec"])

    assert (spec.trainer.backend, spec.trainer.gpus_per_replica) == ("torch", 4)
    assert spec.trainer.parallelism == Parallelism()
    assert (spec.max_context_length, spec.trainer.sharded) == (4096, False)
    reason = "the megatron trainer refuses attention in windows (sliding_window: 4096)"
    assert reason in run(folder, "--gpus", "8xH100").output
    longer = run(folder, "--gpus", "8xH100", "--sequence-length", "4097")
    assert longer.exit_code == 1
    assert "16 to 4096 tokens" in " ".join(longer.output.split())


@pytest.mark.parametrize("gpus", ["8xH100", "1xB200"])
def test_a_head_has_no_memory_for_the_model_where_engines_sample(gpus: str, qwen3_8b: str) -> None:
    spec = planned(qwen3_8b, "--gpus", gpus, "--sequence-length", "8192")["spec"]

    memory = int(spec["head"]["resources"]["memory"].removesuffix("Gi"))
    assert 12 <= memory <= 20
    assert "engines" in spec["sampler"]


@pytest.mark.parametrize("gpus", ["272xH100", "2048xH100", "4224xH100"])
def test_of_many_gpus_no_more_sample_than_a_session_has_engines(gpus: str, tmp_path: Path) -> None:
    small = folder_with(CONFIGS["Qwen/Qwen2.5-0.5B"], tmp_path / "small")

    spec = BaseModelSpec.model_validate(planned(small, "--gpus", gpus)["spec"])

    trainer, sampler = spec.trainer, spec.sampler
    assert sampler.replicas == 64
    assert sampler.engines is not None
    used = [shape.replicas * shape.gpus_per_replica for shape in (trainer, sampler)]
    assert f"{sum(used)}xH100" == gpus
    assert "more than the 64 of a session" in run(small, "--gpus", gpus).output


def test_more_gpus_than_a_session_can_use_are_refused_with_how_many_it_can(tmp_path: Path) -> None:
    small = folder_with(CONFIGS["Qwen/Qwen2.5-0.5B"], tmp_path / "small")

    refused = run(small, "--gpus", "4232xH100")

    assert refused.exit_code == 1
    assert "at most 512 trainer pods and 64 engines" in " ".join(refused.output.split())
    assert "Use 4224xH100-80" in refused.output


def test_where_gpus_are_shared_the_engines_are_in_the_trainer_pods(qwen3_8b: str) -> None:
    manifest = planned(qwen3_8b, "--gpus", "1xB200", "--sequence-length", "8192")

    spec = BaseModelSpec.model_validate(manifest["spec"])
    assert spec.sampler.colocated
    build = a_build(spec, a_session(baseModel=spec.model_name))
    inference = sampler_config(build).inference
    assert inference.colocated
    assert [url.partition(".")[0] for url in inference.urls] == ["http://trainer-0"]
    assert build.resolved.devices == Devices("gpu.nvidia.com", 1)
    assert not build.resolved.head_computes


def test_a_plan_has_the_time_that_a_head_needs_to_save(qwen3_8b: str) -> None:
    options = [qwen3_8b, "--gpus", "8xH100"]
    adapter, whole = (planned(*options, *full)["spec"]["head"] for full in ([], ["--full"]))
    printed = " ".join(run(*options, "--full").output.split())

    assert adapter["suspendSeconds"] == 120
    assert whole["suspendSeconds"] == 18 * 60
    assert "suspendSeconds 1080 91.5 GiB of values and moments at 200 MB/s" in printed


def test_a_plan_says_what_sharing_gpus_needs_of_the_cluster(qwen3_8b: str) -> None:
    shared, apart = (run(qwen3_8b, "--gpus", gpus).output for gpus in ("1xH100", "2xH100"))

    needs = "needs Kubernetes 1.34 or newer, and a driver of devices that offers gpu.nvidia.com"
    assert needs in shared
    assert "Kubernetes" not in apart


def test_a_plan_says_which_parts_need_more_memory_than_nodes_have(
    qwen3_8b: str, tmp_path: Path
) -> None:
    large = folder_with(CONFIGS["deepseek-ai/DeepSeek-V2"], tmp_path / "large")

    printed = run(large, "--gpus", "64xH200", "--full").output
    spec = planned(large, "--gpus", "64xH200", "--full")["spec"]
    small = run(qwen3_8b, "--gpus", "8xH100", "--full").output

    seldom = "nodes with 8 GPUs usually have 2048 at most"
    lines = {line.split("  ")[0].strip(): line for line in printed.splitlines()}
    for part, name in (("head", "head"), ("trainer pod", "trainer"), ("sampler pod", "sampler")):
        memory = int(spec[name]["resources"]["memory"].removesuffix("Gi"))
        assert f"{memory} GiB of memory" in lines[part]
        assert (seldom in lines[part]) == (memory > 2048) == (name != "sampler")
    assert "trainer pod" in small
    assert seldom not in small


def test_a_folder_is_offered_from_a_volume_and_a_hub_model_from_the_hub(
    hub: str, qwen3_8b: str, tmp_path: Path
) -> None:
    fetched = run_with_hub(hub, tmp_path, "acme/tiny", "--gpus", "2xL4", "--json")

    of_hub = json.loads(fetched.stdout)
    of_folder = planned(qwen3_8b, "--gpus", "8xH100")
    assert of_hub["metadata"]["name"] == "tiny"
    assert of_hub["spec"]["modelName"] == "acme/tiny"
    assert of_hub["spec"]["source"] == {"hub": "acme/tiny"}
    assert of_folder["spec"]["source"] == {"volume": {"claimName": "models", "path": "qwen3-8b"}}


@pytest.mark.parametrize("name", ["my model", "_model", "größe"])
def test_a_folder_whose_name_no_model_can_have_is_refused(name: str, tmp_path: Path) -> None:
    folder = folder_with(CONFIGS["Qwen/Qwen3-8B"], tmp_path / name)

    refused = run(folder, "--gpus", "8xH100", "--json")

    assert refused.exit_code == 1
    assert f"spec.modelName: {name!r}" in refused.output
    assert "Rename the model's" in " ".join(refused.output.split())


def test_engines_make_room_for_the_adapters_that_a_base_model_takes_and_no_others(
    qwen3_8b: str,
) -> None:
    adapters = planned(qwen3_8b, "--gpus", "8xH100", "--lora-rank", "8")
    whole_models = planned(qwen3_8b, "--gpus", "8xH100", "--full")

    assert adapters["spec"]["limits"] == {"maxLoraRank": 8}
    assert whole_models["spec"]["limits"] == {"maxLoraRank": 1}


def test_a_plan_says_what_its_engines_can_not_adapt(tmp_path: Path) -> None:
    lite = folder_with(CONFIGS["deepseek-ai/DeepSeek-V2-Lite"], tmp_path / "lite")
    other = folder_with(CONFIGS["deepseek-ai/DeepSeek-V2"], tmp_path / "other")

    assert "train_attn=False" in run(lite, "--gpus", "8xH200").output
    assert "train_attn" not in run(lite, "--gpus", "8xH200", "--full").output
    assert "train_attn" not in run(other, "--gpus", "64xH200").output


def test_plans_for_whole_mixtures_let_adapters_adapt_no_experts(
    tmp_path: Path,
) -> None:
    mixture = folder_with(CONFIGS["Qwen/Qwen3-30B-A3B"], tmp_path / "model")

    adapters, whole = (planned(mixture, "--gpus", "64xH200", *more) for more in ([], ["--full"]))

    assert whole["spec"]["sampler"]["engines"]["loraTargetModules"] == ["o_proj", "lm_head"]
    assert "loraTargetModules" not in adapters["spec"]["sampler"]["engines"]


def test_a_whole_models_state_fits_ray_s_store_in_the_pods_of_its_plan(qwen3_8b: str) -> None:
    spec = planned(qwen3_8b, "--gpus", "8xH100", "--full")["spec"]
    state = 12 * 8_190_735_360

    build = a_build(
        BaseModelSpec.model_validate(spec), a_session(baseModel=spec["modelName"], lora=None)
    )
    cluster = ray_cluster(build)["spec"]

    [trainers] = [g for g in cluster["workerGroupSpecs"] if g["groupName"] == "trainer"]
    groups = (trainers, cluster["headGroupSpec"])
    stores = [int(group["rayStartParams"]["object-store-memory"]) for group in groups]
    assert min(stores) >= state
    assert max(stores) <= 1.5 * state


def test_both_snapshots_of_an_adapter_fit_the_scratch_space_of_its_plan(qwen3_8b: str) -> None:
    plan = planned(qwen3_8b, "--gpus", "8xH100", "--lora-rank", "128")["spec"]
    spec = BaseModelSpec.model_validate({**plan, "head": {**plan["head"], "image": "worker"}})
    state = 12 * 128 * 2_727_936

    durability = head_config(a_build(spec, a_session(baseModel=spec.model_name))).durability

    assert durability.max_disk_bytes is not None
    assert durability.max_disk_bytes - durability.max_journal_bytes >= 2 * state


def test_both_snapshots_of_a_whole_model_fit_the_scratch_space_of_its_plan(qwen3_8b: str) -> None:
    plan = planned(qwen3_8b, "--gpus", "8xH100", "--full")["spec"]
    head = {**plan["head"], "image": "worker", "durability": {"level": "local"}}
    spec = BaseModelSpec.model_validate({**plan, "head": head})
    state = 12 * 8_190_735_360

    config = head_config(a_build(spec, a_session(baseModel=spec.model_name, lora=None)))

    room = config.durability.max_disk_bytes
    assert room is not None
    assert 2 * state <= room <= 3 * state
    printed = " ".join(run(qwen3_8b, "--gpus", "8xH100", "--full").output.split())
    assert "scratch space 322 GiB of the head 2 snapshots of 91.5 GiB may take 60%" in printed
    assert planned(qwen3_8b, "--gpus", "8xH100")["spec"]["head"]["resources"]["scratch"] == "16Gi"


@pytest.mark.parametrize("slots", [2, 3, 16])
def test_all_runs_of_a_pool_s_cluster_fit_its_gpus_and_its_scratch_space(
    slots: int, qwen3_8b: str
) -> None:
    pool = ("--gpus", "8xH100", "--lora-rank", "64", "--pool-slots", str(slots))

    plan = planned(qwen3_8b, *pool)["spec"]

    assert plan["sharing"] == "Shared"
    assert plan["pool"] == {"slotsPerCluster": slots}
    spec = BaseModelSpec.model_validate({**plan, "head": {**plan["head"], "image": "worker"}})
    cluster = TrainingSessionSpec(base_model=spec.model_name, role="Pool", owner="pool")
    durability = head_config(a_build(spec, cluster)).durability
    assert durability.max_disk_bytes is not None
    state = 12 * 64 * 2_727_936
    assert durability.max_disk_bytes >= slots * (2 * state + durability.max_journal_bytes)
    architecture = families.read(CONFIGS["Qwen/Qwen3-8B"])
    one = make_plan(architecture, parse("8xH100", 8), sequence_length=32768, lora_rank=64)
    all_of_them = make_plan(
        architecture, parse("8xH100", 8), sequence_length=32768, lora_rank=64, slots=slots
    )
    memory = all_of_them.division.trainer.memory
    assert memory.trained >= slots * one.division.trainer.memory.trained
    assert memory.total <= all_of_them.fleet.gpu.memory


def test_more_runs_than_the_gpus_hold_are_refused_with_their_number(qwen3_8b: str) -> None:
    refused = run(qwen3_8b, "--gpus", "1xL4", "--pool-slots", "500")

    assert refused.exit_code == 1
    assert "500 runs that share a cluster" in " ".join(refused.output.split())


def test_a_pool_of_full_fine_tunes_is_refused(qwen3_8b: str) -> None:
    refused = run(qwen3_8b, "--gpus", "8xH100", "--full", "--pool-slots", "2")

    assert refused.exit_code == 1
    assert "a fully fine-tuned model has a cluster of its own" in " ".join(refused.output.split())


def test_a_trainer_pod_has_memory_for_the_store_that_a_whole_model_passes_once(
    qwen3_8b: str,
) -> None:
    trainer = planned(qwen3_8b, "--gpus", "8xH100", "--full")["spec"]["trainer"]

    state_gib = 12 * 8_190_735_360 / 2**30
    store_gib = math.ceil(state_gib / 0.8)
    assert trainer["resources"]["memory"] == f"{16 + 2 * trainer['gpusPerReplica'] + store_gib}Gi"


def test_a_full_fine_tune_needs_more_gpus_than_an_adapter(qwen3_8b: str) -> None:
    adapter = run(qwen3_8b, "--gpus", "2xH100")
    full = run(qwen3_8b, "--gpus", "2xH100", "--full")

    assert adapter.exit_code == 0
    assert full.exit_code == 1
    assert "full fine-tuning of this model (qwen3, 8.2B parameters)" in full.output
    assert "What would fit: 2xH200-141; 4xH100-80; LoRA of rank 32." in full.output
    assert "LoRA of rank 32" in full.output


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"model_type": "mamba"}, ["--gpus", "8xH100"], "model_type: 'mamba'"),
        ({"model_type": "gemma2"}, ["--gpus", "8xH100"], "with trainer.backend torch"),
        ([], ["--gpus", "8xH100"], "expected a JSON object, got list"),
        (CONFIGS["Qwen/Qwen3-8B"], ["--gpus", "8xH1"], "GPU 'H1' is unknown"),
        (
            CONFIGS["Qwen/Qwen3-8B"],
            ["--gpus", "8xH100", "--sequence-length", "50000"],
            "16 to 40960 tokens",
        ),
    ],
)
def test_what_can_not_be_planned_is_refused_in_one_sentence(
    config: object, arguments: list[str], message: str, tmp_path: Path
) -> None:
    result = run(folder_with(config, tmp_path / "model"), *arguments)

    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_configuration_comes_from_the_hub_once_and_from_the_cache_then(
    hub: str, tmp_path: Path
) -> None:
    fetched = run_with_hub(hub, tmp_path, "acme/tiny", "--gpus", "1xL4")
    cached = run_with_hub(NO_HUB, tmp_path, "acme/tiny", "--gpus", "1xL4")

    assert "0.49B parameters on 1xL4-24" in fetched.stdout
    assert cached.stdout == fetched.stdout


def test_a_model_that_is_nowhere_is_refused_with_what_to_do(hub: str, tmp_path: Path) -> None:
    result = run_with_hub(hub, tmp_path, "acme/absent", "--gpus", "1xL4")

    assert result.returncode == 1
    assert "'acme/absent' is neither a local folder nor in the local" in result.stderr
    assert "set HF_TOKEN" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_model_that_the_mirror_of_a_server_lacks_is_sought_at_the_hub(
    hub: str, tmp_path: Path
) -> None:
    result = run_with_hub(f"{hub}/hf", tmp_path, "acme/absent", "--gpus", "1xL4")

    assert result.returncode == 1
    assert "unset HF_ENDPOINT, which names a Tinkercloud server" in " ".join(result.stderr.split())
    assert "HF_TOKEN" not in result.stderr


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = run(str(tmp_path / "nope"), "--gpus", "1xL4")

    assert result.exit_code == 1
    assert f"'{tmp_path}/nope' is neither a local folder nor" in " ".join(result.output.split())
