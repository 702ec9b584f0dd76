"""The programs of the page about own data that need only the SDK run as they are written."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tinker import types
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.small_models.models import save, tiny_llama

PAGE = (Path(__file__).parents[3] / "docs" / "use" / "own-data.md").read_text()
MODEL = "tiny/llama"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HELD_OUT = r"held out (\S+), (\S+)"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model that has a chat template."""
    folder = save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    """Return its tokenizer."""
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    return found


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server of this model."""
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: model}) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that the page writes."""
    for name, content in re.findall(r"^\$ cat > (\S+) <<'END'\n(.*?)^END$", PAGE, re.M | re.S):
        (tmp_path / name).write_text(content)
    return tmp_path


def program(title: str) -> str:
    """Return the Python blocks of a section of the page as one program."""
    [section] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return "\n".join(re.findall(r"^```python\n(.*?)^```", section, re.M | re.S))


def run(server: Server, folder: Path, title: str) -> subprocess.CompletedProcess[str]:
    """Run the program of a section in a folder with the data of the page."""
    return subprocess.run(
        [sys.executable, "-c", program(title)],
        env={**os.environ, **server.environment_of_recipes(folder), "MODEL": MODEL},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_program_lowers_the_loss_and_its_best_checkpoint_answers_next_week(
    server: Server, folder: Path
) -> None:
    with (folder / "conversations.jsonl").open("a") as lines:
        lines.write("\n")

    ran = run(server, folder, "Supervised fine-tuning")
    later = run(server, folder, "Next week")

    assert ran.returncode == 0, ran.stderr[-4000:]
    first, second, third, *_ = ran.stdout.splitlines()
    assert first == f"reading conversations.jsonl with the tokenizer of {MODEL} ..."
    assert second == "6 conversations"
    assert re.fullmatch(r"run \S+:train:0", third)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", ran.stdout)]
    # The last batch of an epoch of five conversations has one.
    assert len(losses) == 8 * 3
    assert sum(losses[-3:]) < sum(losses[:3])
    held_out = [(float(each), path) for each, path in re.findall(HELD_OUT, ran.stdout)]
    loss, best = min(held_out)
    assert len(held_out) == 8
    assert f"best: {best} with {loss:.3f}" in ran.stdout
    assert later.returncode == 0, later.stderr[-4000:]
    said, answer = later.stdout.splitlines()
    assert said == "loading the checkpoint ..."
    assert answer in ran.stdout


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        "1",
        '{"messages": []}',
        '{"messages": [{"role": "user", "content": "a"}]}',
        '{"messages": [{"role": "user"}, {"role": "assistant", "content": "b"}]}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}',
        '{"messages": [{"content": "a"}, {"role": "assistant", "content": "b"}]}',
        # A byte that is not UTF-8.
        "\udcff",
    ],
)
def test_a_broken_line_is_named_with_its_number(
    tokenizer: PreTrainedTokenizerBase, folder: Path, broken: str
) -> None:
    data = folder / "conversations.jsonl"
    with data.open("a", errors="surrogateescape") as lines:
        lines.write(f"{broken}\n")
    [reading] = re.findall(r"^def datum.*?(?=^random)", PAGE, re.M | re.S)

    with pytest.raises(SystemExit, match=r"conversations.jsonl, line 7: ") as raised:
        exec(reading, {"DATA": data, "json": json, "tokenizer": tokenizer, "types": types})  # noqa: S102 - it is the page's own program

    assert "line 2" not in str(raised.value)


@pytest.mark.long
def test_a_program_that_cannot_read_its_data_leaves_no_run(server: Server, folder: Path) -> None:
    before = server.request("GET", "/api/v1/runs").json()["runs"]
    (folder / "conversations.jsonl").write_text("{}")

    ran = run(server, folder, "Supervised fine-tuning")

    assert ran.stderr.endswith("conversations.jsonl, line 1: KeyError('messages')\n")
    after = server.request("GET", "/api/v1/runs").json()["runs"]
    assert {each["run_id"] for each in after} == {each["run_id"] for each in before}


@pytest.mark.long
def test_groups_with_equal_rewards_are_not_trained(server: Server, folder: Path) -> None:
    problems = [{"prompt": "a", "answer": "e"}, {"prompt": "b", "answer": "never said"}]
    (folder / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))

    ran = run(server, folder, "Reinforcement learning with your own reward")

    assert ran.returncode == 0, ran.stderr[-4000:]
    trained = re.findall(r"mean reward 0\.\d\d, (\d+) answers trained", ran.stdout)
    assert len(trained) == 20
    assert "8" in trained
    assert set(trained) <= {"0", "8"}
    assert ran.stdout.rstrip().endswith("/sampler_weights/final")
