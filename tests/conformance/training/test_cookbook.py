"""Unmodified training programs of tinker-cookbook, run offline against a server."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tinkercloud_testing.serving.servers import Server

MODEL = "tiny/llama"
README = Path(__file__).parents[3] / "README.md"

SUPERVISED = """
import asyncio, sys
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

data, log_path, model = sys.argv[1:]
common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=model,
    renderer_name="role_colon",
    max_length=128,
    batch_size=4,
    train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES,
)
config = train.Config(
    log_path=log_path,
    model_name=model,
    recipe_name="test",
    renderer_name="role_colon",
    dataset_builder=FromConversationFileBuilder(common_config=common, file_path=data),
    learning_rate=1e-2,
    lr_schedule="constant",
    num_epochs=4,
    lora_rank=8,
    save_every=3,
    eval_every=0,
)
asyncio.run(train.main(config))
"""


@pytest.fixture
def environment(server: Server, tmp_path: Path) -> dict[str, str]:
    """Return an environment whose only hub is the mirror of this server."""
    return server.environment_of_recipes(tmp_path)


def run(arguments: list[str], environment: dict[str, str]) -> None:
    result = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]


def metrics(log_path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_supervised_training_on_a_local_file_lowers_the_loss_and_saves(
    server: Server, tmp_path: Path, environment: dict[str, str]
) -> None:
    data, log_path = tmp_path / "data.jsonl", tmp_path / "logs"
    conversations = [
        {
            "messages": [
                {"role": "user", "content": f"Say {word}"},
                {"role": "assistant", "content": word * 3},
            ]
        }
        for word in ("ab", "cd", "ef", "gh") * 4
    ]
    data.write_text("\n".join(map(json.dumps, conversations)))

    run(["-c", SUPERVISED, str(data), str(log_path), MODEL], environment)

    losses = [row["train_mean_nll"] for row in metrics(log_path) if "train_mean_nll" in row]
    assert losses[-1] < 0.7 * losses[0]
    saved = [json.loads(line) for line in (log_path / "checkpoints.jsonl").read_text().splitlines()]
    listed = {c.tinker_path for c in server.rest().list_user_checkpoints().result().checkpoints}
    assert saved[-1]["state_path"] in listed
    assert saved[-1]["sampler_path"] in listed


def test_math_rl_on_arithmetic_runs_to_its_end_by_the_readmes_command(
    server: Server, tmp_path: Path, environment: dict[str, str]
) -> None:
    log_path = tmp_path / "logs"
    (command,) = re.findall(r"\$ \S+/python (-m tinker_cookbook[^`]*)```", README.read_text())
    arguments = shlex.split(command.replace("\\\n", ""))
    here = [f"model_name={MODEL}", f"log_path={log_path}"]
    named = [option.partition("=")[0] for option in here]
    assert len([each for each in arguments if each.partition("=")[0] in named]) == len(here)

    run([each for each in arguments if each.partition("=")[0] not in named] + here, environment)

    rows = metrics(log_path)
    gaps = [row["optim/kl_sample_train_v1"] for row in rows if "optim/kl_sample_train_v1" in row]
    assert len(gaps) == 2
    assert max(map(abs, gaps)) < 1e-4
