"""The playground of the console: what a base model and a checkpoint answer to one question."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tinkercloud_api.cli import app
from tinkercloud_testing.clients.console_browser import SCRIPT, Browser, read_only_browser, text
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.small_models.chat import CHAT_MODEL, a_chat_model

PAGE = "/console/playground"
QUESTION = {"base_model": CHAT_MODEL, "prompt": "What?", "max_tokens": "6", "seed": "5"}

LOGPROB = re.compile(r'"\s+(-?[\d.e-]+)\s*$', re.MULTILINE)
"""A logprob in the table of a command."""


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = a_chat_model(tmp_path_factory.mktemp("models") / "chat")
    with a_server(tmp_path_factory.mktemp("state"), {CHAT_MODEL: folder}) as running:
        yield running


@pytest.fixture(scope="module")
def browser(chat_server: Server) -> Browser:
    return Browser(chat_server).log_in()


@pytest.fixture(scope="module")
def checkpoint(chat_server: Server) -> str:
    """Return the path of a checkpoint for sampling."""
    training = chat_server.client().create_lora_training_client(CHAT_MODEL, rank=4).result()
    step(training)
    return str(training.save_weights_for_sampler("asked").result().path)


def answered(server: Server, call: str, **fields: Any) -> dict[str, Any]:
    """Return the first choice of a call of the OpenAI-compatible API."""
    body = {"model": CHAT_MODEL, "max_tokens": 6, "seed": 5, **fields}
    answer = server.request("POST", f"/oai/api/v1/{call}", body)
    assert answer.status == 200, answer.body
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def logprobs_of(page: str) -> list[list[float]]:
    """Return the logprobs in the titles of tokens, by answer."""
    parts = re.findall(r'<p class="tokens">(.*?)</p>', page, re.DOTALL)
    return [[float(each) for each in re.findall(r'<span title="(.*?)">', part)] for part in parts]


def command_of(page: httpx.Response) -> str:
    """Return the command in the foot of a page."""
    (command,) = re.findall(r"in a terminal: <code>(.*?)</code>", text(page))
    return str(command)


def test_a_base_model_and_a_checkpoint_answer_side_by_side(
    chat_server: Server, browser: Browser, checkpoint: str
) -> None:
    assert f'<option value="{checkpoint}">' in browser.get(PAGE).text
    page = browser.submit(PAGE, **QUESTION, checkpoint=checkpoint)

    asked = [{"role": "user", "content": "What?"}]
    choices = [
        answered(chat_server, "chat/completions", model=model, messages=asked, logprobs=True)
        for model in (CHAT_MODEL, checkpoint)
    ]
    expected = [[each["logprob"] for each in one["logprobs"]["content"]] for one in choices]
    assert page.status_code == 200
    for found, wanted in zip(logprobs_of(page.text), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-3)
    assert "<script>" not in page.text
    assert ">\nWhat?</textarea>" in page.text


def test_a_text_is_continued_as_completions_do(chat_server: Server, browser: Browser) -> None:
    page = browser.submit(PAGE, **{**QUESTION, "kind": "text", "temperature": "0"})

    expected = answered(chat_server, "completions", prompt="What?", temperature=0, logprobs=0)
    (found,) = logprobs_of(page.text)
    assert found == pytest.approx(expected["logprobs"]["token_logprobs"], rel=1e-3)


def test_the_page_has_the_command_that_asks_the_same(chat_server: Server, browser: Browser) -> None:
    assert "in a terminal: <code>tinkercloud ask MODEL TEXT</code>" in browser.get(PAGE).text
    prompt = "--help 'it's' $(exit) `exit` ; \"x\" ü"
    page = browser.submit(PAGE, **{**QUESTION, "prompt": prompt, "kind": "text"})
    of_lines = browser.submit(PAGE, **{**QUESTION, "prompt": "one\ntwo", "checkpoint": "a b"})

    program, *words = shlex.split(command_of(page))
    user = {"TINKER_BASE_URL": chat_server.url, "TINKER_API_KEY": API_KEY}
    answer = CliRunner(env=user).invoke(app, ["ask", "--logprobs", *words[1:]])
    assert (program, words[0], answer.exit_code) == ("tinkercloud", "ask", 0), answer.stderr
    (found,) = logprobs_of(page.text)
    assert [float(each) for each in LOGPROB.findall(answer.stdout)] == pytest.approx(found)
    options = "--as chat --max-tokens 6 --temperature 1.0 --seed 5 --compare 'a b'"
    assert command_of(of_lines) == f"tinkercloud ask {options} {CHAT_MODEL} - < prompt.txt"


def test_what_can_not_be_answered_says_why(
    chat_server: Server, browser: Browser, checkpoint: str
) -> None:
    stranger = Browser(chat_server).log_in(chat_server.new_key("stranger"))
    for asking, fields, why in (
        (stranger, {"checkpoint": checkpoint}, "does not exist, or belongs to another owner"),
        (browser, {"checkpoint": "tinker://x"}, "tinker://x"),
        (browser, {"base_model": "tiny/unknown"}, "is not served"),
        (browser, {"prompt": "x" * 2000}, "512"),
    ):
        page = asking.submit(PAGE, **{**QUESTION, **fields})
        assert page.status_code == 200, fields
        assert why in text(page).partition("Answers</h2>")[2], fields
    assert checkpoint not in stranger.get(PAGE).text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "0"),
        ("max_tokens", "513"),
        ("max_tokens", "x"),
        ("temperature", "-1"),
        ("temperature", "nan"),
        ("seed", "-1"),
        ("seed", "9" * 30),
        ("kind", "poem"),
        ("prompt", ""),
        ("prompt", "x" * 20_001),
        ("base_model", "x" * 1000),
        ("checkpoint", "x" * 1025),
    ],
)
def test_fields_that_are_wrong_are_named(browser: Browser, field: str, value: str) -> None:
    page = browser.submit(PAGE, **{**QUESTION, field: value})

    assert (page.status_code, f"{field}: " in text(page)) == (400, True)
    assert len(page.text) < 3000


def test_attacks_are_shown_as_text(browser: Browser) -> None:
    page = browser.submit(
        PAGE, **{**QUESTION, "prompt": f"</textarea>{SCRIPT}", "checkpoint": "<b>"}
    )

    assert page.status_code == 200
    assert "<script>" not in page.text
    assert "<b>" not in page.text
    assert page.text.count("</textarea>") == 1


def test_a_read_only_key_asks_nothing(chat_server: Server) -> None:
    reader = read_only_browser(chat_server)

    assert "read-only" in reader.get(PAGE).text
    answer = reader.submit(PAGE, **QUESTION)
    assert (answer.status_code, "is read-only" in text(answer)) == (403, True)


@pytest.mark.long
def test_an_answer_that_takes_too_long_says_so(tmp_path: Path, chat_server: Server) -> None:
    settings = {"TINKERCLOUD_SAMPLE_WAIT_SECONDS": "0.01", "TINKERCLOUD_PRELOAD": "false"}
    with a_server(tmp_path, chat_server.models, settings) as server:
        page = Browser(server).log_in().submit(PAGE, **QUESTION)

    assert page.status_code == 200
    assert "no answer within 0.01 s" in text(page)
