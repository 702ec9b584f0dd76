"""Agents for programming work with a served model as their pages say: they call it, with tools."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkercloud_testing.cluster.image_build.programs import ROOT, system_tool
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.small_models.chat import an_agents_model

MODEL = "tiny/agent"
PAGE = (ROOT / "docs" / "use" / "agents.md").read_text()
NAME = "river.txt"
ANSWER = "It is the Amazon."

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the agents in the versions of the page, and return the folder of their programs."""
    folder = tmp_path_factory.mktemp("agents")
    versions = {
        "@anthropic-ai/claude-code": r"Claude Code ([\d.]+\d) was run",
        "@qwen-code/qwen-code": r"Qwen Code ([\d.]+\d) was run",
    }
    wanted = [f"{name}@{re.findall(text, PAGE)[0]}" for name, text in versions.items()]
    subprocess.run(
        [system_tool("npm"), "install", "--no-fund", "--prefix", folder, *wanted], check=True
    )
    return folder / "node_modules" / ".bin"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which agents work."""
    folder = tmp_path_factory.mktemp("project")
    (folder / NAME).write_text("The Amazon is a river.\n")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Iterator[Server]:
    """Serve a model that reads the file of the project with a tool, and then answers."""
    call = json.dumps({"name": "Read", "arguments": {"file_path": str(project / NAME)}})
    says = f"<tool_call>\n{call}\n</tool_call>"
    folder = an_agents_model(tmp_path_factory.mktemp("models") / "agent", says, ANSWER)
    with a_server(tmp_path_factory.mktemp("state"), {MODEL: folder}) as running:
        yield running


def variables(title: str, command: str) -> str:
    """Return the commands of a section that set variables, without the agent's own."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"^```console\n(.*?)^```", section, re.M | re.S)
    script = re.sub(r"^\$ ", "", block, flags=re.M)
    assert script.endswith(command)
    return script.removesuffix(command)


def answered(server: Server, programs: Path, project: Path, home: Path, script: str) -> str:
    """Return what a script prints to a user of the server in the folder of the project."""
    ran = subprocess.run(
        ["/bin/bash", "-eu", "-c", script],
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(home),
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": API_KEY,
            "MODEL": MODEL,
        },
        cwd=project,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_claude_code_reads_a_file_with_its_tool_and_answers(
    server: Server, programs: Path, project: Path, tmp_path: Path
) -> None:
    command = "claude --print --verbose --output-format stream-json 'Which river?'"

    printed = answered(
        server, programs, project, tmp_path, variables("Claude Code", "claude\n") + command
    )

    events = [json.loads(line) for line in printed.splitlines()]
    [result] = [each for each in events if each["type"] == "user"]
    assert "The Amazon is a river." in json.dumps(result["message"]["content"])
    assert (events[-1]["result"], events[-1]["is_error"]) == (ANSWER, False)


def test_qwen_code_prints_the_answer_of_the_model(
    server: Server, programs: Path, project: Path, tmp_path: Path
) -> None:
    title, command = "Qwen Code and similar agents", "qwen --auth-type openai"

    printed = answered(
        server,
        programs,
        project,
        tmp_path,
        variables(title, f"{command}\n") + f"{command} --prompt 'Which river?'",
    )

    assert ANSWER in printed
