"""A checkpoint of a mixture sharded over ranks resumes on session heads with other layouts."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import tinker
import torch
from safetensors.torch import load_file
from torch import Tensor

from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.servers import TRAINERS, Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_qwen3_moe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "tiny/qwen3-moe"
PATIENCE = 300
"""Seconds until ranks have loaded a model."""
DIVIDED = {
    "TINKERCLOUD_TRAINER__BACKEND": "megatron",
    "TINKERCLOUD_TRAINER__RANKS": "4",
    "TINKERCLOUD_TRAINER__TENSOR_PARALLEL": "2",
    "TINKERCLOUD_TRAINER__PIPELINE_PARALLEL": "2",
}
OTHERS = [
    TRAINERS["torch"],
    {"TINKERCLOUD_TRAINER__BACKEND": "megatron", "TINKERCLOUD_TRAINER__RANKS": "1"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save(tiny_qwen3_moe(), tmp_path_factory.mktemp("models") / "qwen3-moe")
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: folder}, DIVIDED) as running:
        yield running


def tensors_of(server: Server, path: str) -> Mapping[str, Tensor]:
    run, _, name = path.removeprefix("tinker://").split("/")
    (folder,) = (server.state_dir / "checkpoints").glob(f"runs/{run}/**/{name}")
    files: list[Path] = sorted(folder.rglob("*.safetensors"))
    return {f"{file.name} {k}": v for file in files for k, v in load_file(file).items()}


@pytest.mark.long
def test_a_checkpoint_of_sharded_ranks_resumes_on_other_trainers(
    server: Server,
) -> None:
    first = server.client()
    training = first.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result(PATIENCE)
    for _ in range(2):
        step(training)
    path = training.save_state("two").result(PATIENCE).path
    expected = [step(training) for _ in range(2)]
    saved = tensors_of(server, path)

    for settings in OTHERS:
        server.stop()
        server.settings = settings
        server.start()
        client: tinker.ServiceClient = server.client()
        resumed = client.create_training_client_from_state_with_optimizer(path).result(PATIENCE)
        again = resumed.save_state("again").result(PATIENCE).path

        returned = tensors_of(server, again)
        assert returned.keys() == saved.keys()
        assert all(torch.equal(returned[name], tensor) for name, tensor in saved.items())
        assert [step(resumed) for _ in range(2)] == pytest.approx(expected, rel=1e-4)
