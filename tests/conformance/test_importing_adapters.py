"""Adapters of Hugging Face PEFT become checkpoints that can be trained, sampled and exported."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker import types
from transformers.modeling_utils import PreTrainedModel

from tinkercloud_testing.models import save, tiny_llama, tiny_qwen3_moe
from tinkercloud_testing.peft_adapters import WEIGHTS, logprobs, write_adapter
from tinkercloud_testing.sdk_steps import score, step
from tinkercloud_testing.servers import Server, a_server

BASES: dict[str, Callable[[], PreTrainedModel]] = {
    "tiny/llama": tiny_llama,
    "tiny/tied": partial(tiny_llama, tied=True),
    "tiny/moe": tiny_qwen3_moe,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "all linear layers": ("tiny/llama", {"target_modules": "all-linear", "lora_alpha": 11}),
    "two modules": ("tiny/llama", {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 64}),
    "a pattern": ("tiny/llama", {"target_modules": r".*\.1\.mlp\.(up|down)_proj"}),
    "rank-stabilized": ("tiny/llama", {"target_modules": ATTENTION, "use_rslora": True}),
    "the LM head": ("tiny/llama", {"target_modules": ["q_proj", "lm_head"]}),
    "in bfloat16": ("tiny/llama", {"target_modules": ATTENTION, "dtype": torch.bfloat16}),
    "in float16": ("tiny/llama", {"target_modules": ATTENTION, "dtype": torch.float16}),
    "tied": ("tiny/tied", {"target_modules": "all-linear"}),
    "a tied LM head": ("tiny/tied", {"target_modules": [*ATTENTION, "lm_head"]}),
    "attention of a mixture": ("tiny/moe", {"target_modules": ATTENTION}),
}
TOKENS = [5, 6, 7, 8, 9, 3, 2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server with an untied, a tied and a mixture model."""
    folders = tmp_path_factory.mktemp("models")
    models = {name: save(make(), folders / name.replace("/", "-")) for name, make in BASES.items()}
    with a_server(tmp_path_factory.mktemp("state"), models) as running:
        yield running


def an_import(server: Server, folder: Path, base: str, **fields: object) -> str:
    """Upload an adapter by plain requests and return the checkpoint's path."""
    content = (folder / WEIGHTS).read_bytes()
    config = json.loads((folder / "adapter_config.json").read_text())
    start = {"base_model": base, "adapter_config": config, "size_bytes": len(content), **fields}
    started = server.post("checkpoints/uploads", start)
    assert started.status == 200, started.body
    (url,) = started.json()["urls"].values()
    received = server.request("PUT", url, content)
    assert received.status == 200, received.body
    finished = server.post(f"checkpoints/uploads/{started.json()['upload_id']}/finish", {})
    assert finished.status == 200, finished.body
    return str(finished.json()["tinker_path"])


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_imported_adapter_computes_what_peft_computes(
    server: Server, tmp_path: Path, name: str
) -> None:
    base, config = ADAPTERS[name]
    folder = write_adapter(BASES[base](), tmp_path / "adapter", **config)
    expected = logprobs(BASES[base](), folder, TOKENS)

    path = an_import(server, folder, base)
    with server.client() as client:
        training = client.create_training_client_from_state(path).result()
        sampler = client.create_sampling_client(model_path=path).result()
        sampled = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()

        np.testing.assert_allclose(score(training, TOKENS), expected, atol=1e-5)
        np.testing.assert_allclose(sampled[1:], expected, atol=1e-5)
        losses = [step(training) for _ in range(3)]
    assert losses[-1] < losses[0]
