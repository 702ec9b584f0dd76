"""A head whose model is trained and sampled elsewhere needs only its description."""

from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_protocol.heads.launch import (
    BaseModelSource,
    HeadConfig,
    InferenceConfig,
    Limits,
    SamplerConfig,
    TrainerConfig,
)
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_testing.small_models.models import (
    EOS_TOKEN_ID,
    save,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen3,
)
from tinkercloud_worker.engine.batch import ModelLimits
from tinkercloud_worker.model.architecture import UnsupportedModelError, read_architecture
from tinkercloud_worker.model.base_model import TorchBaseModel
from tinkercloud_worker.run_head import build_backend

SERVERS = SamplerConfig(
    backend="external",
    inference=InferenceConfig(kind="vllm", urls=("http://127.0.0.1:9",)),
)


def described(model: PreTrainedModel, folder: Path) -> Path:
    """Write a model without its weights."""
    save(model, folder)
    (folder / "model.safetensors").unlink()
    return folder


def a_config(
    model: Path, folder: Path, sampler: SamplerConfig, max_context_length: int = 100
) -> HeadConfig:
    return HeadConfig(
        head="h",
        generation="g",
        model=BaseModelSource(name="tiny", path=str(model)),
        token_file="",
        checkpoint_root=(folder / "store").as_uri(),
        scratch_dir=str(folder / "scratch"),
        trainer=TrainerConfig(backend="none"),
        sampler=sampler,
        limits=Limits(max_context_length=max_context_length),
    )


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3, tiny_gpt2])
def test_a_description_gives_the_same_information_as_the_model(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    loaded = TorchBaseModel(make())

    read = read_architecture(str(described(make(), tmp_path / "model")))

    assert read.targets == loaded.targets
    assert read.limits == ModelLimits(loaded.vocab_size, loaded.max_context_length)


async def test_a_head_with_external_servers_needs_no_weights(tmp_path: Path) -> None:
    model = described(tiny_llama(), tmp_path / "model")

    backend = build_backend(a_config(model, tmp_path, SERVERS))

    assert backend.trainer.limits == ModelLimits(vocab_size=264, max_context_length=100)
    assert backend.end_tokens == {EOS_TOKEN_ID}
    with pytest.raises(InvalidRequest, match="only samples"):
        backend.trainer.add_model("run", LoraConfig(rank=4))
    backend.trainer.remove_model("run")
    backend.thread.stop()
    await backend.sampler.close()


async def test_the_context_limit_of_the_model_overrides_a_larger_setting_with_a_warning(
    tmp_path: Path,
) -> None:
    model = tiny_llama()
    own = model.config.max_position_embeddings
    folder = described(model, tmp_path / "model")

    with capture_logs() as logs:
        backends = [
            build_backend(a_config(folder, tmp_path, SERVERS, max_context_length=length))
            for length in (own, own + 1)
        ]

    assert [backend.trainer.limits.max_context_length for backend in backends] == [own, own]
    warnings = [line for line in logs if line["log_level"] == "warning"]
    assert [(line["wanted"], line["taken"]) for line in warnings] == [(own + 1, own)]
    for backend in backends:
        backend.thread.stop()
        await backend.sampler.close()


def test_a_head_that_samples_itself_needs_weights(tmp_path: Path) -> None:
    model = described(tiny_llama(), tmp_path / "model")

    with pytest.raises(UnsupportedModelError, match=r"neither model\.safetensors nor"):
        build_backend(a_config(model, tmp_path, SamplerConfig()))


def test_a_missing_folder_is_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no-such-folder is not a folder"):
        read_architecture(str(tmp_path / "no-such-folder"))
