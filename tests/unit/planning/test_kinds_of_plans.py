"""`tinkercloud plan` for one machine, for external servers, and for several sessions."""

import json
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_api.config.settings import load_settings
from tinkercloud_crds.base_model import BaseModelSpec
from tinkercloud_operator.children.engines import sampler_config
from tinkercloud_planning.families import read
from tinkercloud_planning.gpus import GIB, UnknownGpus, gpu, parse
from tinkercloud_planning.memory import sampling, weight_bytes
from tinkercloud_planning.search import Demand
from tinkercloud_planning.serving import plan_serving
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


def words(*arguments: str) -> str:
    """Return what the command prints, with single spaces."""
    return " ".join(run(*arguments).output.split())


@pytest.fixture
def qwen3_8b(tmp_path: Path) -> str:
    return folder_with(CONFIGS["Qwen/Qwen3-8B"], tmp_path / "qwen3-8b")


@pytest.fixture
def deepseek_v3(tmp_path: Path) -> str:
    return folder_with(CONFIGS["deepseek-ai/DeepSeek-V3"], tmp_path / "v3")


def test_a_wrong_kind_of_gpu_is_refused_before_the_hub_is_asked(tmp_path: Path) -> None:
    refused = run_with_hub(NO_HUB, tmp_path, "acme/absent", "--gpus", "8xH10")

    assert refused.returncode == 1
    assert "GPU 'H10' is unknown" in refused.stderr


def test_without_a_network_the_hub_is_asked_once_and_the_file_it_needs_is_named(
    tmp_path: Path,
) -> None:
    refused = run_with_hub(NO_HUB, tmp_path, "acme/absent", "--gpus", "8xH100")

    assert refused.returncode == 1
    printed = " ".join(refused.stderr.split())
    assert f"the hub at {NO_HUB} cannot be reached" in printed
    needed = f"{NO_HUB}/acme/absent/resolve/main/config.json"
    assert f"download {needed} elsewhere, put it in a folder as config.json, and pass" in printed
    assert "Retrying" not in refused.stderr


@pytest.mark.parametrize("quantized", [{}, {"quantization_config": {"quant_method": "mxfp4"}}])
def test_gpt_oss_is_refused_for_its_family_whatever_its_weights_are(
    quantized: dict[str, Any], tmp_path: Path
) -> None:
    folder = folder_with({"model_type": "gpt_oss", **quantized}, tmp_path / "model")

    refused = words(folder, "--gpus", "8xH100")

    assert "model_type: 'gpt_oss' is not supported by the planner" in refused
    assert "No copy or format of its weights changes that" in refused
    assert "The torch trainer supports it" in refused


GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
}
"""The fields that are the same in both sizes of gpt-oss."""


@pytest.mark.parametrize(
    ("layers", "experts", "advice"),
    [
        (24, 32, "(about 39 GiB, and what is trained): use `tinkercloud serve`"),
        (36, 128, "about 218 GiB, but the largest GPU that the planner knows (B200-192) has 178"),
    ],
)
def test_a_refusal_of_gpt_oss_has_its_size_and_whether_a_gpu_holds_it(
    layers: int, experts: int, advice: str, tmp_path: Path
) -> None:
    config = {**GPT_OSS, "num_hidden_layers": layers, "num_local_experts": experts}

    assert advice in words(folder_with(config, tmp_path / "model"), "--gpus", "8xH100")


def test_one_gpu_serves_what_a_session_would_need_more_gpus_for(
    qwen3_8b: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (qwen3_8b, "--gpus", "1x24GiB", "--sequence-length", "4096")
    assert "does not fit on 1x24GiB" in words(*options)
    assert "--serve needs less" in words(*options)

    variables = planned(*options, "--serve")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()

    assert (settings.trainer.device, settings.trainer.dtype) == ("cuda", "bfloat16")
    assert settings.trainer.max_batch_tokens >= 4096
    assert settings.sampler.max_cached_tokens >= 4096
    assert (settings.limits.max_lora_rank, settings.limits.max_context_length) == (32, 4096)
    printed = run(*options, "--serve").output
    for name, value in variables.items():
        assert f"export {name}={value}\n" in printed


def test_one_gpu_is_offered_to_serve_only_sequences_that_it_can(qwen3_8b: str) -> None:
    longest = words(qwen3_8b, "--gpus", "1xL4")

    assert "With --serve, sequences of 2048 tokens would fit." in longest
    options = (qwen3_8b, "--gpus", "1xL4", "--serve", "--sequence-length")
    assert [run(*options, length).exit_code for length in ("2048", "4096")] == [0, 1]
    assert "--serve" not in words(qwen3_8b, "--gpus", "1x8GiB")


@pytest.mark.parametrize("kind", ["24GiB", "A100-40", "H100", "B200"])
def test_a_served_model_has_one_copy_and_fits_with_a_full_cache(kind: str) -> None:
    model = read(CONFIGS["Qwen/Qwen3-8B"])

    plan = plan_serving(Demand(model, 4096, lora_rank=32), gpu(kind))

    assert plan.memory.weights == weight_bytes(model)
    assert plan.memory.total <= gpu(kind).memory
    # Each token has keys and values of 8 heads of 128 in 36 layers, in 16 bits.
    assert plan.memory.kv_cache == int(1.5 * plan.cached_tokens * 36 * 8 * 2 * 128 * 2)


def test_a_model_that_cannot_be_served_is_refused_with_what_would_fit(qwen3_8b: str) -> None:
    refused = words(qwen3_8b, "--gpus", "1x24GiB", "--serve")

    assert "cannot be served on 1x24GiB" in refused
    assert "What would fit: 1xA100-80; sequences of 4096 tokens." in refused
    assert run(qwen3_8b, "--gpus", "1xA100-80", "--serve").exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpus", "8xH100"), "uses one GPU, for all sessions; use 1xH100-80"),
        (("--gpus", "1xH100", "--full"), "full fine-tuning with --serve"),
        (("--gpus", "1xH100", "--train-only"), "use one of them"),
        (("--gpus", "1xH100", "--sequence-length", "50000"), "16 to 40960 tokens"),
    ],
)
def test_what_cannot_be_served_is_refused(
    options: tuple[str, ...], message: str, qwen3_8b: str
) -> None:
    assert message in words(qwen3_8b, *options, "--serve")
    assert run(qwen3_8b, *options, "--serve").exit_code == 1


def test_all_gpus_train_where_external_servers_sample(qwen3_8b: str) -> None:
    options = (qwen3_8b, "--gpus", "8xH100", "--train-only")

    spec = BaseModelSpec.model_validate(planned(*options)["spec"])

    assert spec.trainer.replicas * spec.trainer.gpus_per_replica == 8
    assert (spec.sampler.backend, spec.sampler.gpus_per_replica) == ("external", 0)
    inference = sampler_config(a_build(spec, a_session(baseModel=spec.model_name))).inference
    assert (inference.kind, inference.urls) == ("sglang", ("http://sglang-0:30000",))
    printed = words(*options)
    assert "servers 1 GPU each one holds 11 sequences of 32768 tokens" in printed
    assert "--tp-size 1 you start SGLang, with --enable-lora --max-lora-rank 32" in printed


def test_whole_models_are_not_planned_for_external_servers(qwen3_8b: str) -> None:
    assert "they accept adapters only" in words(
        qwen3_8b, "--gpus", "8xH100", "--train-only", "--full"
    )


def test_sessions_divide_the_gpus_and_a_plan_says_how_many_could(qwen3_8b: str) -> None:
    one = words(qwen3_8b, "--gpus", "64xH100")
    printed = words(qwen3_8b, "--gpus", "64xH100", "--sessions", "16")
    spec = planned(qwen3_8b, "--gpus", "64xH100", "--sessions", "16")["spec"]

    assert "1xH100-80 are enough for one; --sessions 64 plans that" in one
    assert "on 4xH100-80 for each of 16 sessions" in printed
    assert "2 train, 2 sample" in printed
    trainer, sampler = spec["trainer"], spec["sampler"]
    assert trainer["replicas"] * trainer["gpusPerReplica"] == 2
    assert sampler["replicas"] * sampler["gpusPerReplica"] == 2


@pytest.mark.parametrize(
    ("gpus", "sessions", "each"),
    [("8xH100", 3, 2), ("24xH100", 2, 8), ("64xH100", 4, 16), ("8xH100", 8, 1), ("6xH100", 1, 6)],
)
def test_a_session_has_an_equal_part_of_a_node_or_whole_nodes(
    gpus: str, sessions: int, each: int
) -> None:
    assert parse(gpus).share(sessions).count == each


def test_more_sessions_than_gpus_are_refused() -> None:
    with pytest.raises(UnknownGpus, match="9 sessions need as many GPUs"):
        parse("8xH100").share(9)


def test_engines_keep_float8_and_trainers_do_not() -> None:
    stored = read(CONFIGS["deepseek-ai/DeepSeek-V3"])
    converted = read({**CONFIGS["deepseek-ai/DeepSeek-V3"], "quantization_config": None})

    sizes = [
        sampling(model, 8, gpu=gpu("H200"), reserve=0, lora_rank=1).weights
        for model in (stored, converted)
    ]

    assert weight_bytes(converted) == 2 * converted.parameters
    assert weight_bytes(stored) / weight_bytes(converted) == pytest.approx(0.5, rel=0.01)
    assert sizes[0] / sizes[1] == pytest.approx(0.5, rel=0.02)


def test_deepseek_v3_gets_engines_over_nodes_that_somebody_else_starts(deepseek_v3: str) -> None:
    options = (deepseek_v3, "--gpus", "32xH200", "--sequence-length", "8192")

    spec = BaseModelSpec.model_validate(planned(*options)["spec"])

    assert spec.trainer.replicas * spec.trainer.gpus_per_replica == 16
    assert spec.sampler.backend == "external"
    printed = words(*options)
    assert "16 train, 16 sample" in printed
    assert "servers 1 x 16 GPUs each no node holds an engine" in printed
    assert "--tp-size 16 --nnodes 2" in printed
    assert "adapters over float8 are unproven" in printed


def test_a_plan_has_the_disk_the_start_and_the_price(qwen3_8b: str) -> None:
    plan = planned(qwen3_8b, "--gpus", "8xH100")["spec"]
    printed = words(qwen3_8b, "--gpus", "8xH100", "--gpu-price", "2.5")

    pods = [plan["trainer"]] * plan["trainer"]["replicas"]
    pods += [plan["sampler"]] * plan["sampler"]["replicas"]
    scratch = sum(int(p["resources"]["scratch"][:-2]) for p in [plan["head"], *pods])
    memory = sum(int(p["resources"]["memory"][:-2]) for p in [plan["head"], *pods])
    cores = sum(int(p["resources"]["cpu"]) for p in [plan["head"], *pods])
    assert f"host {memory} GiB, {cores} cores requested together" in printed
    assert f"disk {scratch} GiB together scratch space of one session" in printed
    assert f"each of {len(pods)} pods downloads 15.3 GiB" in printed
    assert "start 3 min" in printed
    assert "price: 20.00 an hour, for 8 GPUs at 2.50" in printed
    assert "price" not in words(qwen3_8b, "--gpus", "8xH100")
    divided = words(qwen3_8b, "--gpus", "8xH100", "--sessions", "2", "--gpu-price", "2.5")
    assert "price: 20.00 an hour, for 8 GPUs at 2.50" in divided
    assert "4 GPUs for each session, at 10.00 an hour" in divided
    assert "host and disk are those of one session: 2 sessions need as much each" in divided
    assert "need as much each" not in printed
    assert "unused" not in divided


def test_a_plan_for_several_sessions_says_which_gpus_none_of_them_uses(qwen3_8b: str) -> None:
    assert "2 of 8 GPUs stay unused" in words(qwen3_8b, "--gpus", "8xH100", "--sessions", "3")


def test_more_sessions_than_fit_are_refused_with_how_many_do(tmp_path: Path) -> None:
    folder = folder_with(CONFIGS["Qwen/Qwen2.5-72B"], tmp_path / "model")

    refused = words(folder, "--gpus", "16xH100", "--sessions", "9")

    assert "does not fit on 1xH100-80" in refused
    assert "With these GPUs at most 2 sessions fit (--sessions 2)." in refused
    assert "each of 2 sessions" in words(folder, "--gpus", "16xH100", "--sessions", "2")
    assert "does not fit on 4xH100-80" in words(folder, "--gpus", "16xH100", "--sessions", "3")


def test_json_of_a_served_model_is_nothing_but_settings(qwen3_8b: str) -> None:
    printed = run(qwen3_8b, "--gpus", "1xH100", "--serve", "--json", "--gpu-price", "2").output

    assert all(name.startswith("TINKERCLOUD_") for name in json.loads(printed))
    assert gpu("H100").memory == 79 * GIB
