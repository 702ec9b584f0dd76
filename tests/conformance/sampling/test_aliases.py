"""Programs with fixed model names run on any served model that has an alias of that name."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tinker import types
from tokenizers import AddedToken

from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.small_models.models import byte_tokenizer, save, tiny_llama

MODEL = "tiny/llama"
ALIAS = "Qwen/Qwen3-4B-Instruct-2507"
SETTINGS = {"TINKERCLOUD_ALIASES": json.dumps({ALIAS: MODEL})}

RECIPES = """
import asyncio, sys
import datasets
from tinker_cookbook.hyperparam_utils import get_lr
from tinker_cookbook.recipes import sl_loop
from tinker_cookbook.recipes.math_rl import train as math_rl

model, folder = sys.argv[1:]
messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "aaaa"}]
conversations = datasets.Dataset.from_list([{"messages": messages}] * 16)
datasets.load_dataset = lambda name: datasets.DatasetDict(train=conversations)

sl_loop.main(
    sl_loop.Config(
        model_name=model,
        log_path=f"{folder}/sl",
        batch_size=4,
        learning_rate=10 * get_lr(model),
        lora_rank=8,
        save_every=2,
    )
)
config = math_rl.CLIConfig(
    model_name=model,
    log_path=f"{folder}/rl",
    env="arithmetic",
    groups_per_batch=2,
    group_size=2,
    max_tokens=3,
    max_steps=1,
    eval_every=0,
    save_every=0,
    lora_rank=4,
    loss_fn="importance_sampling",
)
asyncio.run(math_rl.cli_main(config))
"""
"""Both recipes look up the renderer by the name of the model; the first has no option for it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model whose tokenizer has the tokens of Qwen's chat template."""
    folder = save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")
    tokenizer = byte_tokenizer()
    marks = [AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def aliased(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Server]:
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: folder}, SETTINGS) as server:
        yield server


def test_a_model_is_listed_trained_sampled_and_resumed_under_its_alias(aliased: Server) -> None:
    client = aliased.client()

    names = [each.model_name for each in client.get_server_capabilities().supported_models]
    training = client.create_lora_training_client(f"{ALIAS}:peft:32768", rank=4).result()
    path = training.save_state("first").result().path
    sampler = training.save_weights_for_sampler("first").result().path

    assert names == [MODEL, ALIAS]
    assert training.get_info().model_name == MODEL
    client.create_training_client_from_state(path, base_model=ALIAS).result()
    client.create_sampling_client(model_path=sampler, base_model=ALIAS).result()
    assert client.create_sampling_client(model_path=sampler).result().get_base_model() == MODEL
    sampling = client.create_sampling_client(base_model=ALIAS).result()
    assert sampling.compute_logprobs(types.ModelInput.from_ints([1, 2])).result()[0] is None


def test_recipes_for_listed_models_train_without_naming_a_renderer(
    aliased: Server, tmp_path: Path
) -> None:
    environment = aliased.environment_of_recipes(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", RECIPES, ALIAS, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "sl" / "metrics.jsonl").open()]
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert losses[-1] < losses[0]
    assert (tmp_path / "rl" / "metrics.jsonl").read_text().count("env/all") >= 1


@pytest.mark.parametrize(
    ("alias", "message"),
    [("other=unknown", "'unknown' is not among the models to serve"), (f"{MODEL}={MODEL}", "also")],
)
def test_the_server_does_not_start_with_an_alias_that_means_nothing(
    alias: str, message: str, folder: Path, tmp_path: Path
) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "tinkercloud_api", "serve", f"--state-dir={tmp_path}"),
            *(f"--model={MODEL}={folder}", f"--alias={alias}"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 1
    assert message in " ".join(result.stderr.split())
