"""The commands of the pages run as they stand, one after another, against one server.

A command of a page is run here, or by the test that `ELSEWHERE` names, or `NOT_RUN` says why it is
not; a new command that is none of these fails a test. Commands of `tinkercloud` that are not run
must at least have options that exist.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyrage
import pytest
import tinker
from typer.testing import CliRunner

from tinkercloud_api.cli import app
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.plan_command import CONFIGS
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.small_models.chat import CHAT_MODEL, a_chat_model

ROOT = Path(__file__).parents[3]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.M | re.S)
HERE = (
    "docs/operate/keys.md",
    "docs/operate/users.md",
    "docs/operate/shared-machine.md",
    "docs/operate/audit.md",
    "docs/operate/quotas.md",
    "docs/operate/operations.md",
    "docs/operate/sizing.md",
    "docs/operate/planning.md",
    "docs/use/installation.md",
    "docs/use/console.md",
    "docs/use/continue-a-run.md",
    "docs/use/own-data.md",
    "docs/use/programs.md",
    "docs/use/weights.md",
    "docs/use/weights-import.md",
)
"""Pages whose shell commands run here, in this order. The first one needs a new catalog."""
PYTHON_HERE = (
    "docs/use/console.md",
    "docs/use/programs.md",
    "docs/use/sdk.md",
    "docs/use/weights.md",
    "README.md",
)
"""Pages whose Python runs here."""
NOT_RUN = {
    r"kubectl|helm|kind |gcloud|eksctl|aws|az |curl -sfL|tinkercloud drain|(export )?TINKER_TAGS="
    r"|pytest tests/cluster|export (KUBECONFIG|TINKERCLOUD_TEST_)"
    r"|client\.create_lora_training_client\(": ("needs a cluster: tests/cluster"),
    r"pip |uv |\.uv/|python3? -m (venv|zipfile)|sglang/bin/pip": "needs a package index",
    r"git clone|hf download|tinkercloud models add Qwen/": "needs a hub",
    r"python -m tinkercloud_testing\.": "needs the tag of a release",
    r"tinker checkpoint push-hf": "needs a hub: tests/conformance/checkpoints has its files",
    r"docker|pg_dump|pg_restore": "needs Docker or PostgreSQL",
    r"vllm|VLLM_|python -m sglang|llama-server|python llama\.cpp": "needs an engine's packages",
    r"curl -s http://127\.0\.0\.1:8000/v1/|export TINKERCLOUD_SAMPLER__": "needs such an engine",
    r"curl https://tinker\.example\.com": "needs an ingress",
    r"export (TINKER_BASE_URL|TINKER_API_KEY|HF_ENDPOINT)=": "names the reader's server",
    r"tinkercloud serve|TINKERCLOUD_\w+=\S+ tinkercloud serve": "serves, as this test's server",
    r"\.venv/bin/jupyter|\.venv/bin/python$|claude$": "is interactive",
    r"tinkercloud demo|python -m tinkercloud_worker\.convert_gguf": "lasts long: tests/packages",
    r"python -m tinker_cookbook\S+ model_name=Qwen/Qwen3-4B": (
        "needs this model's tokenizer: tests/conformance/sampling/test_aliases.py"
    ),
    r"processor = get_image_processor": (
        "needs a model that reads images: tests/conformance/training/test_images.py"
    ),
    r"tinkercloud programs logs \S+ --follow": "lasts as long as the program",
    r"tinkercloud runs export": "needs MLflow or W&B: tests/recipes/test_exported_curves.py",
    r"tinkercloud plan \S+ .*--serve": "its output is cut: tests/unit/planning",
    r"tinkercloud backup restore": "needs a stopped server: tests/conformance/catalog",
    r"useradd|install -d|systemctl|kill -9": "changes the machine",
    r"make |PYTHONPATH=|TORCH_INDEX=|\.venv/bin/pytest|def test_a_raycluster": "is a contributor's",
    r"python -m benchmarks|export TINKERCLOUD_BENCHMARK|(for|draw|tokens|post)\b|cat > engine": (
        "is a benchmark"
    ),
}
"""Beginnings of commands that no test runs as they stand, and why."""
CONFORMANCE = "tests/conformance"
ELSEWHERE = {
    ("README.md", r"tinker_cookbook"): f"{CONFORMANCE}/training/test_cookbook.py",
    ("docs/operate/quickstart.md", r"tinkercloud cluster check"): (
        "tests/cluster/install/test_cluster_check.py"
    ),
    ("docs/operate/quickstart.md", r"first_steps\.py|import tinker"): (
        f"{CONFORMANCE}/clients/test_tutorial.py"
    ),
    ("docs/operate/quickstart.md", r"sed "): "tests/unit/cluster_check/test_values.py",
    ("docs/use/agents.md", r""): f"{CONFORMANCE}/chat/test_agents_page.py",
    ("docs/use/http-api.md", r""): f"{CONFORMANCE}/clients/test_http_page.py",
    ("docs/use/openai.md", r"import|class Flight"): f"{CONFORMANCE}/chat/test_openai_page.py",
    ("docs/use/own-data.md", r"tinker_cookbook"): "tests/recipes/test_cookbook_recipes.py",
    ("docs/use/own-data.md", r"mlflow|lm_eval|inspect|questions"): (
        "tests/recipes/test_evaluation.py"
    ),
    ("docs/use/own-data.md", r"import tinker|^def targets|^sampler = "): (
        f"{CONFORMANCE}/clients/test_own_data.py"
    ),
    ("docs/use/tutorial.md", r""): f"{CONFORMANCE}/clients/test_tutorial.py",
    ("docs/use/weights.md", r"checkpoints merge|ask\.py"): (
        f"{CONFORMANCE}/checkpoints/test_serving_elsewhere.py"
    ),
}
"""Tests that take the commands of a page which match an expression out of the page."""


@dataclass(frozen=True)
class Command:
    """A command of a page with the output that the page shows, or a whole block of Python."""

    page: str
    text: str
    shown: str = ""
    is_python: bool = False

    @property
    def test(self) -> str | None:
        """The test elsewhere that runs it."""
        for (page, pattern), test in ELSEWHERE.items():
            if page == self.page and re.search(pattern, self.text, re.M):
                return test
        return None

    @property
    def reason(self) -> str | None:
        """Why no test runs it."""
        reasons = [why for start, why in NOT_RUN.items() if re.match(start, self.text)]
        return reasons[0] if reasons else None

    @property
    def is_run_here(self) -> bool:
        """Whether this module runs it."""
        return self.test is None and self.reason is None

    @property
    def columns(self) -> list[str]:
        """The names of the columns of a table that the page shows."""
        titles = re.search(r"^ (\w.*)$", self.shown, re.M)
        return re.split(r"  +", titles[1].strip()) if titles else []


def is_complete(text: str) -> bool:
    """Whether a shell would not read a further line of a command."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    document = re.search(r"<<-?\s*'?(\w+)'?", text)
    loop = re.match(r"for .*; do\b", text, re.S)
    return not (
        text.endswith("\\")
        or (document and not re.search(rf"^{document[1]}$", text, re.M))
        or (loop and not re.search(r"\bdone\b", text))
    )


def commands_of_block(page: str, block: str, is_script: bool) -> Iterator[Command]:
    """Yield the commands of a script, or those after `$` with the lines that follow them."""
    lines = [*block.splitlines(), "$ "]
    text, shown = "", ""
    while lines:
        line = lines.pop(0)
        if not is_script and not line.startswith("$ "):
            shown += line + "\n"
            continue
        if shlex.split(text, comments=True):
            yield Command(page, text, shown)
        text, shown = line.removeprefix("$ "), ""
        while not is_complete(text):
            text += "\n" + lines.pop(0)


def commands_of(page: str) -> list[Command]:
    """Return the commands of a page, in order."""
    found: list[Command] = []
    for language, block in BLOCK.findall(PAGES[page]):
        if language == "python":
            found.append(Command(page, block, is_python=True))
        elif language == "sh" or re.search(r"^\$ ", block, re.M):
            found += commands_of_block(page, block, language == "sh")
    return found


ALL = [command for page in PAGES for command in commands_of(page)]
PRELUDE = f"""
import os
import tinker
import torch
from tinker import types
from tinkercloud_testing.clients.sdk_steps import a_text

service_client = tinker.ServiceClient()
create = service_client.create_lora_training_client
training_client = training = create({CHAT_MODEL!r}, rank=4).result()
data = [a_text([5, 6, 7], advantages=[1.0, 1.0])]
step, reward = 1, 0.5
progress = {{"sampler": training.save_weights_for_sampler("last").result().path}}
"""
"""What the Python of the pages builds on."""
PROGRAM_OF_THE_SERVER = "TINKERCLOUD_PROGRAM_ID"
"""Is in the Python that runs as a program of the server."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model that has a chat template."""
    return a_chat_model(tmp_path_factory.mktemp("models") / "chat", positions=2048)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server of this model, on which each owner has limits and admins run files."""
    state_dir = tmp_path_factory.mktemp("state")
    limits = {"models": 50, "tokens_per_minute": 10**9, "storage_bytes": 10**12}
    settings = {
        "TINKERCLOUD_PROGRAMS__ALLOW_CODE": "true",
        "TINKERCLOUD_TENANTS": json.dumps({"research": {"owners": ["*"], "limits": limits}}),
    }
    with a_server(state_dir, {CHAT_MODEL: model}, settings) as running:
        yield running


def a_run(server: Server, key: str = API_KEY) -> tinker.TrainingClient:
    """Return a run that has the checkpoints which the pages name."""
    training = server.client(key).create_lora_training_client(CHAT_MODEL, rank=4).result()
    step(training)
    for name in ("NAME", "old"):
        training.save_state(name).result()
    for name in ("NAME", "final", "step-24"):
        training.save_weights_for_sampler(name).result()
    training.save_weights_external("NAME").result()
    return training


def in_this_place(text: str, run: str, places: Mapping[str, str]) -> str:
    """Return a text of a page with the run, the models and the folders of this test.

    Args:
        text: the text.
        run: the id of a run.
        places: what stands for an expression.
    """
    own = {
        r"9f0f6c6a-5c5e-4d0c-8a51-6f3f3f8f8a10:train:0|(?<![$A-Z_])RUN\b": run,
        r"tinker://\.\.\.": f"tinker://{run}",
        r"\bMODEL_ID\b": run,
        r"(?<![$A-Z_\"])SESSION\b": run.partition(":")[0],
        r"HuggingFaceTB/SmolLM2-135M-Instruct|(?<=ask )llama|(?<=--base-model )NAME": CHAT_MODEL,
        r"(?<![$A-Z_])PROGRAM\b": '"$(newest_program)"',
        **places,
    }
    for pattern, value in own.items():
        text = re.sub(pattern, value, text)
    return text


PREPARATION = {
    "docs/use/weights-import.md": (
        "tinkercloud checkpoints export tinker://RUN/weights/NAME my-adapter",
    ),
}
"""Commands that make what the page assumes."""
SHELL = """
newest_program() {
    curl -sS "$TINKER_BASE_URL/api/v1/programs" -H "X-API-Key: $TINKER_API_KEY" |
        python -c 'import json, sys; print(json.load(sys.stdin)["programs"][0]["program_id"])'
}
"""


def test_every_command_is_run_here_or_elsewhere_or_says_why_not() -> None:
    unknown = [each for each in ALL if each.is_run_here and not each.is_python]

    assert {each.page for each in unknown} == set(HERE)
    assert {each.page for each in ALL if each.is_run_here and each.is_python} == set(PYTHON_HERE)


def test_no_entry_of_the_lists_is_without_a_command() -> None:
    for start in NOT_RUN:
        assert any(re.match(start, each.text) for each in ALL), start
    for (page, pattern), test in ELSEWHERE.items():
        assert any(re.search(pattern, each.text, re.M) for each in ALL if each.page == page)
        assert Path(page).name in (ROOT / test).read_text(), test


@pytest.fixture
def places(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """Return what stands for the names and folders of a page; write the files that it needs."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "tinkercloud.toml").touch()
    (tmp_path / "backups").mkdir()
    (tmp_path / "prompt.txt").write_text("Once")
    [recipe] = [each.text for each in ALL if PROGRAM_OF_THE_SERVER in each.text and each.is_python]
    (tmp_path / "recipe.py").write_text(recipe)
    for name in ("Qwen/Qwen2.5-72B", "Qwen/Qwen3-8B"):
        for folder in (tmp_path / name, tmp_path / Path(name).name):
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    page = Path(request.node.callspec.params["page"]).stem
    names = {rf"\b{name}\b": f"{name}-{page}" for name in ("ada", "bob", "ci", "vision")}
    return names | {
        "/etc/tinkercloud": str(tmp_path / "etc"),
        "/opt/tinkercloud/bin": str(Path(sys.executable).parent),
        "/var/backups/tinkercloud": str(tmp_path / "backups"),
        r"sudo -u tinkercloud ": "",
        "/models/my-llama": str(model),
    }


@pytest.mark.parametrize("page", HERE)
def test_the_commands_of_a_page_run(
    server: Server, tmp_path: Path, places: dict[str, str], page: str
) -> None:
    # There, bob leaves, and his run is stopped.
    is_of_bob = page == "docs/operate/shared-machine.md"
    key = server.new_key(places[r"\bbob\b"]) if is_of_bob else API_KEY
    run = str(a_run(server, key).model_id)
    commands = [
        *(Command(page, text) for text in PREPARATION.get(page, ())),
        *(each for each in commands_of(page) if each.is_run_here and not each.is_python),
    ]
    texts = [in_this_place(each.text, run, places) for each in commands]

    printed = outputs_of(server, tmp_path, texts)

    for command, output in zip(commands, printed, strict=True):
        lines = [re.split(r"  +", line.strip()) for line in output.splitlines()]
        assert not command.columns or command.columns in lines, (command.text, output)


def outputs_of(server: Server, folder: Path, commands: Sequence[str]) -> list[str]:
    """Run commands in one shell of a user on the server's machine; return what each prints."""
    mark = "-- next command --"
    session = server.post("create_session", {"sdk_version": "0.38.0"}).json()["session_id"]
    ran = subprocess.run(
        ["/bin/bash", "-eu", "-c", SHELL + f"\necho '{mark}'\n".join(commands)],
        env={
            **server.environment(),
            **server.environment_of_recipes(folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SESSION": session,
            "COLUMNS": "300",
        },
        cwd=folder,
        # The answer to all questions.
        input="y\n" * 20,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, "\n".join([ran.stdout[-4000:], ran.stderr[-4000:]])
    return ran.stdout.split(f"{mark}\n")


def test_the_python_of_the_pages_runs(server: Server, tmp_path: Path) -> None:
    blocks = [
        (page, command.text)
        for page in PYTHON_HERE
        for command in commands_of(page)
        if command.is_python and command.is_run_here and PROGRAM_OF_THE_SERVER not in command.text
    ]
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    own = {r"age1\.\.\.": recipient}
    codes = [
        f"exec(compile({in_this_place(code, '', own)!r}, {page!r}, 'exec'))"
        for page, code in blocks
    ]

    ran = subprocess.run(
        [sys.executable, "-c", "\n".join([PRELUDE, *codes])],
        env={
            **server.environment_of_recipes(tmp_path),
            "PYTHONPATH": str(ROOT / "tests" / "support"),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr[-4000:]


@pytest.mark.parametrize(
    "command",
    [each for each in ALL if re.match(r"(\w+=\S+ )*tinkercloud ", each.text) and each.reason],
    ids=lambda each: f"{Path(each.page).stem}: {each.text.split(chr(10))[0][:60]}",
)
def test_a_command_that_is_not_run_has_only_options_that_exist(command: Command) -> None:
    words = shlex.split(re.sub(r"^(\w+=\S+ )*", "", command.text), comments=True)[1:]

    # The help is printed once all options are read.
    result = CliRunner().invoke(app, [*words, "--help"])

    assert result.exit_code == 0, result.output
