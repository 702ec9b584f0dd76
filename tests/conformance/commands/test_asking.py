"""`tinkercloud ask`: the answers of the playground in a terminal."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tinkercloud_api.cli import app
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.small_models.chat import CHAT_MODEL, a_chat_model

EXACT = ("--max-tokens", "6", "--temperature", "0")


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = a_chat_model(tmp_path_factory.mktemp("models") / "chat")
    with a_server(tmp_path_factory.mktemp("state"), {CHAT_MODEL: folder}) as running:
        yield running


@pytest.fixture(scope="module")
def checkpoint(chat_server: Server) -> str:
    """Return the path of a checkpoint for sampling."""
    training = chat_server.client().create_lora_training_client(CHAT_MODEL, rank=4).result()
    step(training)
    return str(training.save_weights_for_sampler("asked").result().path)


def ask(
    server: Server, *arguments: str, written: bytes | None = None, key: str = API_KEY
) -> Result:
    """Run `tinkercloud ask` with something written to its standard input."""
    variables = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": key}
    return CliRunner().invoke(app, ["ask", *arguments], input=written, env=variables)


def answers(server: Server, *arguments: str, written: bytes | None = None) -> list[dict[str, Any]]:
    """Return the first choices of the answers that a command prints."""
    result = ask(server, *arguments, "--json", written=written)
    assert result.exit_code == 0, result.stderr
    return [each["choices"][0] for each in json.loads(result.stdout)]


def sent(server: Server, call: str, **fields: Any) -> dict[str, Any]:
    """Return the first choice of a call of the OpenAI-compatible API."""
    body = {"model": CHAT_MODEL, "max_tokens": 6, "temperature": 0, **fields}
    answer = server.request("POST", f"/oai/api/v1/{call}", body)
    assert answer.status == 200, answer.body
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_a_message_of_a_chat_is_answered_and_a_text_is_continued(chat_server: Server) -> None:
    # The first one waits until the model is loaded.
    said = ask(chat_server, CHAT_MODEL, "What?", *EXACT)
    continued = ask(chat_server, CHAT_MODEL, "What?", "--as", "text", *EXACT)

    asked = [{"role": "user", "content": "What?"}]
    message = sent(chat_server, "chat/completions", messages=asked, logprobs=True)["message"]
    text = sent(chat_server, "completions", prompt="What?", logprobs=0)["text"]

    def shown(answer: str) -> str:
        kept = (each if each.isprintable() or each in "\n\t" else "\ufffd" for each in answer)
        return "".join(kept) + "\n"

    assert (said.stdout, continued.stdout) == (shown(message["content"]), shown(text))


def test_a_base_model_and_a_checkpoint_answer_one_after_the_other(
    chat_server: Server, checkpoint: str
) -> None:
    both = (CHAT_MODEL, "What?", "--compare", checkpoint, *EXACT)
    raw = answers(chat_server, *both)
    printed = ask(chat_server, *both, "--logprobs").stdout

    asked = [{"role": "user", "content": "What?"}]
    expected = [
        sent(chat_server, "chat/completions", model=model, messages=asked, logprobs=True)
        for model in (CHAT_MODEL, checkpoint)
    ]
    assert [each["message"] for each in raw] == [each["message"] for each in expected]
    of_base, of_checkpoint = printed.removeprefix(f"{CHAT_MODEL}:\n").split(f"\n{checkpoint}:\n")
    for part, choice in zip((of_base, of_checkpoint), raw, strict=True):
        logprobs = [f"{each['logprob']:.5g}" for each in choice["logprobs"]["content"]]
        assert re.findall(r'"\s+(-?[\d.e-]+)\s*$', part, re.MULTILINE) == logprobs


def test_a_seed_gets_the_same_answer_again(chat_server: Server) -> None:
    first, again, other = (
        answers(chat_server, CHAT_MODEL, "What?", "--max-tokens", "6", "--seed", seed)
        for seed in ("5", "5", "6")
    )

    assert first[0]["logprobs"] == again[0]["logprobs"] != other[0]["logprobs"]


def test_a_question_is_read_from_standard_input_without_its_last_line_break(
    chat_server: Server,
) -> None:
    text = "-x\n\n'Größe'\n"
    read = answers(chat_server, CHAT_MODEL, "-", "--as", "text", *EXACT, written=text.encode())

    expected = sent(chat_server, "completions", prompt=text[:-1], logprobs=0)
    assert read[0]["text"] == expected["text"]


@pytest.mark.parametrize(
    ("arguments", "written", "why"),
    [
        (("tiny/unknown", "What?"), None, "'tiny/unknown' is not served; served: 'tiny/chat'"),
        (("tinker://x", "What?"), None, "'tinker://x' is not tinker://RUN/sampler_weights/NAME"),
        ((CHAT_MODEL, "x" * 2000), None, "512"),
        ((CHAT_MODEL, ""), None, "TEXT: it is empty"),
        ((CHAT_MODEL, "-"), b"", "TEXT: it is empty"),
        ((CHAT_MODEL, "-"), b"\xff", "TEXT: standard input is not UTF-8"),
    ],
)
def test_what_can_not_be_answered_says_why(
    chat_server: Server, arguments: tuple[str, ...], written: bytes | None, why: str
) -> None:
    result = ask(chat_server, *arguments, written=written)

    assert (result.exit_code, result.stdout) == (1, "")
    assert why in result.stderr


def test_the_answer_of_the_first_model_is_printed_though_the_second_has_none(
    chat_server: Server,
) -> None:
    result = ask(chat_server, CHAT_MODEL, "What?", "--compare", "tiny/unknown")

    assert result.exit_code == 1
    assert result.stdout.startswith(f"{CHAT_MODEL}:")
    assert "404: model: " in result.stderr


def test_a_checkpoint_of_another_owner_does_not_exist(chat_server: Server, checkpoint: str) -> None:
    result = ask(chat_server, checkpoint, "What?", key=chat_server.new_key("stranger"))

    assert result.exit_code == 1
    assert "does not exist, or belongs to another owner" in result.stderr
