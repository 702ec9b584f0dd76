"""The first program of the page about own data runs as it is written."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tinkercloud_testing.models import save, tiny_llama
from tinkercloud_testing.servers import Server, a_server

PAGE = (Path(__file__).parents[3] / "docs" / "use" / "own-data.md").read_text()
MODEL = "tiny/llama"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server with a tiny model that has a chat template."""
    folder = save(tiny_llama(), tmp_path_factory.mktemp("models") / "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: folder}) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that the page writes."""
    for name, content in re.findall(r"^\$ cat > (\S+) <<'END'\n(.*?)^END$", PAGE, re.M | re.S):
        (tmp_path / name).write_text(content)
    return tmp_path


def run(server: Server, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the program of the page in a folder with its data."""
    page, _, _ = PAGE.partition("## The same with the cookbook")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **server.environment_of_recipes(folder), "MODEL": MODEL},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_program_lowers_the_loss_and_chooses_the_best_checkpoint(
    server: Server, folder: Path
) -> None:
    ran = run(server, folder)

    assert ran.returncode == 0, ran.stderr[-4000:]
    epochs = re.findall(r"epoch \d: loss (\S+), held out (\S+), (\S+)", ran.stdout)
    assert float(epochs[-1][0]) < float(epochs[0][0])
    held_out, best = min((float(loss), path) for _, loss, path in epochs)
    assert f"best: {best} with {held_out:.3f}" in ran.stdout


@pytest.mark.parametrize("broken", ["{", '{"messages": [{"role": "user", "content": "a"}]}', "1"])
def test_a_broken_line_is_named_with_its_number(folder: Path, broken: str) -> None:
    data = folder / "conversations.jsonl"
    with data.open("a") as lines:
        lines.write(f"{broken}\n")
    [function] = re.findall(r"^def conversations.*?^            yield messages$", PAGE, re.M | re.S)
    defined: dict[str, Any] = {"json": json}
    exec(function, defined)  # noqa: S102 - it is the page's own program

    with pytest.raises(SystemExit, match=r"conversations.jsonl, line 7: "):
        list(defined["conversations"](data))
