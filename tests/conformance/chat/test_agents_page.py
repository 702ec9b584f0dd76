"""The examples of the page about agents run as they are written."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tinkercloud_testing.serving.servers import API_KEY, Server
from tinkercloud_testing.small_models.chat import CHAT_MODEL, a_chat_model

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "use" / "agents.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def code(title: str, language: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", section(title), re.M | re.S)
    return re.sub(r"^\$ ", "", "".join(blocks), flags=re.M)


def run(command: list[str], script: str, server: Server, programs: Path, home: Path) -> str:
    """Run a script of the page as a user of the server, and return what it prints.

    Args:
        command: the program that reads the script.
        script: the script.
        server: the server.
        programs: folder of the programs that the page installs.
        home: an empty home folder.
    """
    ran = subprocess.run(
        command,
        input=script,
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(home),
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": API_KEY,
            "MODEL": CHAT_MODEL,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install what the page installs into an environment of its own; return its programs."""
    [wanted] = re.findall(r"^\$ pip install (.*)$", PAGE, re.M)
    folder, uv = tmp_path_factory.mktemp("agents") / "venv", str(ROOT / ".uv" / "bin" / "uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    # The configuration of the workspace leaves `llm` out.
    install = [uv, "pip", "install", "--no-config", "--quiet", "--python", str(folder)]
    subprocess.run([*install, *shlex.split(wanted)], check=True)
    return folder / "bin"


@pytest.mark.long
@pytest.mark.parametrize("framework", ["LiteLLM", "LangChain", "pydantic-ai"])
def test_a_framework_prints_what_the_model_says(
    chat_server: Server, programs: Path, tmp_path: Path, framework: str
) -> None:
    python = [str(programs / "python"), "-"]

    printed = run(python, code(framework, "python"), chat_server, programs, tmp_path)

    assert printed.strip()


@pytest.mark.long
def test_llm_prints_what_the_model_says(
    chat_server: Server, programs: Path, tmp_path: Path
) -> None:
    shell = ["/bin/bash", "-eu"]

    printed = run(shell, code("llm", "console"), chat_server, programs, tmp_path)

    assert printed.strip()


def test_the_calls_of_open_webui_list_models_and_stream_an_answer(
    chat_server: Server, tmp_path: Path
) -> None:
    shell = ["/bin/bash", "-eu"]

    printed = run(shell, code("Open WebUI", "console"), chat_server, tmp_path, tmp_path)

    listed, *events = [line for line in printed.replace("data: ", "\n").splitlines() if line]
    assert CHAT_MODEL in [model["id"] for model in json.loads(listed)["data"]]
    assert events[-1] == "[DONE]"
    parts = [json.loads(event)["choices"] for event in events[:-1]]
    assert "".join(each[0]["delta"].get("content") or "" for each in parts if each)


def test_the_template_for_the_model_of_the_quickstart_makes_it_call_a_tool(
    chat_server: Server, tmp_path: Path
) -> None:
    a_chat_model(tmp_path / ".cache" / "tinkercloud" / "SmolLM2-135M-Instruct", positions=2048)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shell, title = ["/bin/bash", "-eu"], "Tools with SmolLM2"
    installed = Path(sys.executable).parent

    try:
        printed = run(shell, code(title, "console"), chat_server, installed, tmp_path)
    finally:
        chat_server.request("DELETE", "/api/v1/base_models/smollm2-tools")

    added, answer = printed.splitlines()
    assert added == "smollm2-tools: ready"
    [choice] = json.loads(answer)["choices"]
    # A random model may call more than once.
    called = [each["function"] for each in choice["message"]["tool_calls"]]
    assert {each["name"] for each in called} == {"weather"}
    assert {json.loads(each["arguments"])["city"] for each in called} <= {"Lima", "Oslo"}


AS_CLAUDE_CODE = """
import os
import anthropic

tool = {"name": "Read", "description": "Reads a file.", "input_schema": {
    "type": "object", "properties": {"file_path": {"type": "string"}}, "required": ["file_path"]}}
with anthropic.Anthropic().messages.stream(
    model=os.environ["ANTHROPIC_MODEL"], max_tokens=24, tools=[tool],
    system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    messages=[{"role": "user", "content": [{"type": "text", "text": "Name a river."}]}],
    metadata={"user_id": "me"}, thinking={"type": "adaptive"}, output_config={"effort": "high"},
) as stream:
    print(stream.get_final_message().usage.output_tokens)
"""
AS_QWEN_CODE = """
import os
import openai

tool = {"type": "function", "function": {"name": "shell", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
events = openai.OpenAI().chat.completions.create(
    model=os.environ["OPENAI_MODEL"], max_tokens=24, tools=[tool], parallel_tool_calls=False,
    messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    stream=True, stream_options={"include_usage": True},
)
print([event.usage for event in events][-1].completion_tokens)
"""


@pytest.mark.parametrize(
    ("title", "last", "requests"),
    [
        ("Claude Code", "claude\n", AS_CLAUDE_CODE),
        ("Qwen Code and similar agents", "qwen --auth-type openai\n", AS_QWEN_CODE),
    ],
)
def test_the_variables_for_an_agent_lead_its_requests_to_the_server(
    chat_server: Server, tmp_path: Path, title: str, last: str, requests: str
) -> None:
    variables = code(title, "console")
    assert variables.endswith(last)
    script = f"{variables.removesuffix(last)}python - <<'END'\n{requests}END\n"
    installed = Path(sys.executable).parent

    printed = run(["/bin/bash", "-eu"], script, chat_server, installed, tmp_path)

    assert 1 <= int(printed) <= 24


def test_the_page_says_which_program_was_not_run() -> None:
    titles = re.findall(r"^## (.*)$", PAGE, re.M)

    assert [each for each in titles if "**Unproven**" in section(each)] == ["Open WebUI"]
