"""Two steps of each kind of training program in tinker-cookbook, unmodified and offline.

Run by hand with `make test-recipes`: each program loads its own Python libraries. A supervised
program and reinforcement learning with synchronous rollouts are in tests/conformance.
"""

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_llama

MODEL = "tiny/llama"
RECIPES = "tinker_cookbook.recipes"
COMMON = [f"model_name={MODEL}", "renderer_name=role_colon", "save_every=0", "eval_every=0"]
MATH = [
    *COMMON,
    *("env=arithmetic", "loss_fn=importance_sampling"),
    *("group_size=2", "groups_per_batch=2", "max_tokens=4", "max_steps=2"),
]
WORDS = ("ab", "cd", "ef", "gh")

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "own-data.md").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server with a tiny model whose context has room for several turns."""
    model = tiny_llama()
    model.config.max_position_embeddings = 4096
    folder = save(model, tmp_path_factory.mktemp("models") / "llama")
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: folder}) as running:
        yield running


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    """Return the folder in which a program keeps its logs."""
    return tmp_path / "logs"


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Write a few conversations, one a line."""
    rows = [{"messages": [*_question(word), _answer(word * 3)]} for word in WORDS * 2]
    return _written(tmp_path / "conversations.jsonl", rows)


def _question(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Say {word}"}]


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _written(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def steps(server: Server, log_path: Path, *arguments: str) -> list[dict[str, float]]:
    """Run a program whose only hub is the server; return the metrics of its training steps."""
    environment = server.environment_of_recipes(log_path.parent)
    result = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


def in_folder(server: Server, folder: Path, *command: str) -> None:
    """Run a program in a folder that has the files which the page writes."""
    for name, content in re.findall(r"^\$ cat > (\S+) <<'END'\n(.*?)^END$", PAGE, re.M | re.S):
        (folder / name).write_text(content)
    result = subprocess.run(
        command,
        cwd=folder,
        env=server.environment_of_recipes(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]


def logged(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    """Return the rows of a log of the cookbook."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def steps_of_page(server: Server, folder: Path, words: str, log: str) -> list[dict[str, float]]:
    """Run the program of the page about own data that has these words, with the page's files.

    Args:
        server: the server, whose model it trains.
        folder: where it runs.
        words: a part of the program.
        log: its folder of logs.

    Returns:
        The metrics of its training steps.
    """
    programs = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    [program] = [each for each in programs if words in each]
    program = program.replace("HuggingFaceTB/SmolLM2-135M-Instruct", MODEL)
    program = program.replace("max_length=512", "max_length=128")
    in_folder(server, folder, sys.executable, "-c", program)
    return logged(folder / log)


def values(rows: list[dict[str, float]], name: str) -> list[float]:
    """Return a metric of all steps that have it."""
    return [row[name] for row in rows if name in row]


def test_the_command_of_the_page_tunes_on_a_file_of_conversations_and_saves_what_answers(
    server: Server, tmp_path: Path
) -> None:
    [command] = re.findall(r"^\$ python (-m \S+\.chat_sl\.train .*?[^\\])\n", PAGE, re.M | re.S)
    command = command.replace("\\\n", "").replace("HuggingFaceTB/SmolLM2-135M-Instruct", MODEL)

    in_folder(server, tmp_path, sys.executable, *shlex.split(command))

    losses = values(logged(tmp_path / "log"), "train_mean_nll")
    assert len(losses) == 4 * 3
    assert sum(losses[-3:]) < sum(losses[:3])
    last = logged(tmp_path / "log", "checkpoints")[-1]["sampler_path"]
    body = {"model": last, "max_tokens": 4, "prompt": "User: Name the river.\n\nAssistant:"}
    assert server.request("POST", "/oai/api/v1/completions", body).status == 200


def test_preferences_by_dpo(server: Server, tmp_path: Path) -> None:
    found = steps_of_page(server, tmp_path, "train_dpo.main", "dpo-log")

    losses = values(found, "dpo_loss")
    # Both models are equal before the first step.
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert len(losses) == 8


def test_reinforcement_learning_with_asynchronous_rollouts(server: Server, log_path: Path) -> None:
    options = [*MATH, "max_steps_off_policy=1", f"log_path={log_path}"]

    found = steps(server, log_path, "-m", f"{RECIPES}.math_rl.train", *options)

    assert len(values(found, "env/all/reward/total")) == 2


def test_reinforcement_learning_in_streamed_minibatches(server: Server, log_path: Path) -> None:
    stream = [
        f"stream_minibatch_config.{name}=2" for name in ("groups_per_batch", "num_minibatches")
    ]

    found = steps(
        server, log_path, "-m", f"{RECIPES}.math_rl.train", *MATH, *stream, f"log_path={log_path}"
    )

    assert len(values(found, "env/all/reward/total")) == 2


def test_reinforcement_learning_over_several_turns(server: Server, log_path: Path) -> None:
    sizes = ["group_size=2", "batch_size=2", "max_tokens=8", "max_steps=2"]

    found = steps(
        server,
        log_path,
        "-m",
        f"{RECIPES}.multiplayer_rl.guess_number.train",
        *COMMON,
        *sizes,
        f"log_path={log_path}",
    )

    turns = values(found, "env/all/turns_per_episode")
    assert len(turns) == 2
    assert max(turns) > 1


def test_distillation_on_policy(server: Server, tmp_path: Path) -> None:
    found = steps_of_page(server, tmp_path, "train_on_policy.main", "on-policy-log")

    divergences = values(found, "teacher_kl")
    # The student is the teacher until its first step.
    assert divergences[0] == pytest.approx(0, abs=1e-4)
    assert len(divergences) == 2


def test_distillation_off_policy(server: Server, tmp_path: Path) -> None:
    found = steps_of_page(server, tmp_path, "train_off_policy.main", "distillation-log")

    losses = values(found, "train/loss:sum")
    assert len(losses) == 2
    # The batches differ, so that the loss need not fall.
    assert all(0 < loss < math.inf for loss in losses)


def test_distillation_of_a_prompt(server: Server, conversations: Path, log_path: Path) -> None:
    found = steps(
        server,
        log_path,
        "-m",
        f"{RECIPES}.prompt_distillation.train",
        *COMMON,
        f"file_path={conversations}",
        *("batch_size=4", "max_length=128", "max_steps=2", "learning_rate=0.01"),
        f"log_path={log_path}",
    )

    losses = values(found, "train_mean_nll")
    assert len(losses) == 2
    # The batches differ, so that the loss need not fall.
    assert all(0 < loss < math.inf for loss in losses)
