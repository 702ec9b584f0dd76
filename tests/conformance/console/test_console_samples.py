"""The text of samples: kept only if the owner of a run wants it, and shown as text."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import tinker
from tinker import types
from typer.testing import CliRunner

from tinkercloud_api.cli import app
from tinkercloud_testing.clients.console_browser import (
    SCRIPT,
    Browser,
    events,
    read_only_browser,
    text,
)
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import API_KEY, Server, a_server
from tinkercloud_testing.small_models.chat import CHAT_MODEL, a_chat_model
from tinkercloud_testing.small_models.models import byte_tokenizer

Sample = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = a_chat_model(tmp_path_factory.mktemp("models") / "chat", positions=4096)
    with a_server(tmp_path_factory.mktemp("state"), {CHAT_MODEL: folder}) as running:
        yield running


def a_run(server: Server, metadata: dict[str, str] | None = None) -> tinker.TrainingClient:
    """Return a run that has taken a step."""
    client = server.client()
    training = client.create_lora_training_client(CHAT_MODEL, rank=4, user_metadata=metadata)
    step(found := training.result())
    return found


@pytest.fixture
def training(server: Server) -> tinker.TrainingClient:
    return a_run(server)


@pytest.fixture
def sampler(training: tinker.TrainingClient) -> tinker.SamplingClient:
    """Return a client of the weights after one step."""
    return training.save_weights_and_get_sampling_client().result()


def path_of(training: tinker.TrainingClient) -> str:
    return f"/api/v1/runs/{training.model_id}/samples"


def switch(server: Server, training: tinker.TrainingClient, *, keep: bool) -> None:
    assert server.request("PUT", path_of(training), {"keep": keep}).status == 200


def found(server: Server, training: tinker.TrainingClient) -> list[Sample]:
    answer = server.request("GET", f"{path_of(training)}?limit=256")
    assert answer.status == 200, answer.body
    return list(answer.json()["samples"])


def draw(sampler: tinker.SamplingClient, prompt: str) -> str:
    """Sample an answer to a prompt and return its text."""
    tokens = byte_tokenizer().encode(prompt)
    params = types.SamplingParams(max_tokens=4, stop=[])
    answer = sampler.sample(types.ModelInput.from_ints(tokens), 1, params).result()
    return str(byte_tokenizer().decode(answer.sequences[0].tokens))


def kept(
    server: Server, training: tinker.TrainingClient, sampler: tinker.SamplingClient, prompt: str
) -> tuple[Sample, str]:
    """Sample until one is kept, and return the newest with the answers that were drawn."""
    answers = []

    def is_kept() -> bool:
        answers.append(draw(sampler, prompt))
        return any(prompt[-20:] in each["prompt"] for each in found(server, training))

    wait_until(is_kept, "a sample that is kept")
    # The catalog can't hold a NUL.
    return found(server, training)[0], "\n".join(answers).replace("\0", "␀")


def test_the_text_of_samples_is_kept_only_while_its_owner_wants_it(
    server: Server, training: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    began = datetime.now(UTC)
    draw(sampler, "before it was on")
    assert server.request("GET", path_of(training)).json() == {
        "run_id": training.model_id,
        "keep": False,
        "samples": [],
    }

    switch(server, training, keep=True)
    newest, answers = kept(server, training, sampler, "while it is on")
    switch(server, training, keep=False)
    draw(sampler, "after it was off")
    switch(server, training, keep=True)
    kept(server, training, sampler, "since it is on again")

    assert newest["step"] == 1
    assert newest["prompt"] == "while it is on"
    assert newest["answer"] in answers
    assert (newest["prompt_tokens_left_out"], newest["answer_tokens_left_out"]) == (0, 0)
    assert began < datetime.fromisoformat(newest["time"]) < datetime.now(UTC)
    prompts = {each["prompt"] for each in found(server, training)}
    assert prompts <= {"while it is on", "since it is on again"}
    assert events(server, began, training.model_id).count("run_samples_keep") == 3


def test_a_sample_has_the_step_of_its_weights_and_scored_prompts_are_no_samples(
    server: Server, training: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    switch(server, training, keep=True)
    step(training)
    later = training.save_weights_for_sampler("later").result().path
    of_checkpoint = server.client().create_sampling_client(later).result()
    scored = types.ModelInput.from_ints(byte_tokenizer().encode("only scored"))

    of_later, _ = kept(server, training, of_checkpoint, "of a checkpoint")
    sampler.compute_logprobs(scored).result()
    # Its report would have the scored prompt, too.
    kept(server, training, of_checkpoint, "of a checkpoint again")
    assert {each["step"] for each in found(server, training)} == {2}
    of_first, _ = kept(server, training, sampler, "of the first step")
    suspend = f"/api/v1/runs/{training.model_id}/stop"
    assert server.request("POST", suspend, {"suspend": True}).status == 200
    of_resumed, _ = kept(server, training, sampler, "of a resumed run")

    assert (of_later["step"], of_first["step"], of_resumed["step"]) == (2, 1, 1)


def test_a_long_prompt_is_cut_and_says_how_much_is_missing(
    server: Server, training: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    switch(server, training, keep=True)
    prompt = "".join(f"{number:04d}" for number in range(750))

    newest, _ = kept(server, training, sampler, prompt)

    assert newest["prompt"] == prompt[1000:]
    assert newest["prompt_tokens_left_out"] == 1000
    page = text(Browser(server).log_in().get(f"/console/runs/{training.model_id}"))
    assert "1000 earlier tokens are left out" in page
    command = ["runs", "samples", training.model_id, "--base-url", server.url]
    printed = CliRunner().invoke(app, [*command, "--api-key", API_KEY]).stdout
    assert "prompt, without 1000 earlier tokens:" in printed


def test_attacks_in_samples_are_shown_as_text(
    server: Server, training: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    switch(server, training, keep=True)
    newest, _ = kept(server, training, sampler, f"\x1b[31m\0{SCRIPT}")
    assert newest["prompt"] == f"\x1b[31m\u2400{SCRIPT}"

    page = Browser(server).log_in().get(f"/console/runs/{training.model_id}")
    command = ["runs", "samples", training.model_id, "--base-url", server.url]
    printed = CliRunner().invoke(app, [*command, "--api-key", API_KEY]).stdout

    shown = '\ufffd[31m\u2400<script>alert("x")</script>\ufffd\ufffd'
    assert "<script>" not in page.text
    assert shown in text(page)
    assert f"step 1, {newest['time'][:19]}Z\nprompt:\n  {shown}\nanswer:\n" in printed


def test_samples_are_deleted_and_no_others_kept(
    server: Server, training: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    options = ["--base-url", server.url, "--api-key", API_KEY]

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["runs", "samples", training.model_id, *arguments, *options])
        return f"{done.exit_code}: {done.output}"

    assert "are not kept; --on keeps the text of some" in run()
    assert "is kept from now on" in run("--on")
    assert "Nothing was sampled" in run()
    kept(server, training, sampler, "to be deleted")
    assert "to be deleted" in run()
    assert "1: error: --delete" in run("--delete", "--on", "--yes")

    assert "are deleted" in run("--delete", "--yes")
    draw(sampler, "late")

    assert json.loads(run("--json").removeprefix("0: ")) == {
        "run_id": training.model_id,
        "keep": False,
        "samples": [],
    }
    switch(server, training, keep=True)
    kept(server, training, sampler, "new")
    assert {each["prompt"] for each in found(server, training)} == {"new"}
    assert "No further samples" in run("--off")
    assert "step 1" in run()


def test_samples_are_switched_and_deleted_with_forms(
    server: Server, training: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    browser, page = Browser(server).log_in(), f"/console/runs/{training.model_id}"
    assert "The text of samples is not kept." in text(browser.get(page))

    answer = browser.submit(f"{page}/samples", keep="yes")
    assert (answer.status_code, answer.headers["location"]) == (303, f"{page}#samples")
    assert "The text of some samples is kept" in text(browser.get(page))
    kept(server, training, sampler, "on the page")
    assert '<div class="tokens">on the page</div>' in browser.get(page).text
    assert browser.submit(f"{page}/samples").status_code == 303
    assert "is not kept; these were kept earlier" in text(browser.get(page))
    assert browser.submit(f"{page}/samples/delete").status_code == 400
    assert browser.submit(f"{page}/samples/delete", confirmed="yes").status_code == 303
    assert "on the page" not in text(browser.get(page))

    reader = read_only_browser(server)
    assert reader.submit(f"{page}/samples", keep="yes").status_code == 403
    assert "Keep the text" not in reader.get(page).text


def test_another_owner_finds_no_samples_and_changes_nothing(
    server: Server, training: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    switch(server, training, keep=True)
    kept(server, training, sampler, "a secret")
    key, path = server.new_key("stranger"), path_of(training)
    stranger, page = Browser(server).log_in(key), f"/console/runs/{training.model_id}/samples"

    assert server.request("GET", path, key=key).status == 404
    assert server.request("PUT", path, {"keep": False}, key=key).status == 404
    assert server.request("DELETE", path, key=key).status == 404
    assert stranger.submit(page).status_code == 404
    assert stranger.submit(f"{page}/delete", confirmed="yes").status_code == 404
    answer = server.request("GET", path).json()
    assert (answer["keep"], answer["samples"][0]["prompt"]) == (True, "a secret")


def test_an_admin_switches_the_samples_of_others_only_off(server: Server) -> None:
    key = server.new_key("ann")
    client = tinker.ServiceClient(base_url=server.url, api_key=key)
    server.clients.made.append(client)
    path = path_of(client.create_lora_training_client(CHAT_MODEL, rank=4).result())

    refused = server.request("PUT", path, {"keep": True})

    assert (refused.status, "only its owner" in refused.detail) == (403, True)
    assert server.request("PUT", path, {"keep": True}, key=key).status == 200
    assert server.request("PUT", path, {"keep": False}).status == 200
    assert server.request("GET", path).json()["keep"] is False


def test_a_switch_needs_a_boolean(server: Server, training: tinker.TrainingClient) -> None:
    bodies: list[object] = [{}, {"keep": "yes"}, {"keep": None}, [], {"keep": "x" * 1_000_000}]
    for wrong in (*bodies, b"{"):
        assert server.request("PUT", path_of(training), wrong).status in {400, 413}, wrong
    for limit in ("0", "257", "x"):
        assert server.request("GET", f"{path_of(training)}?limit={limit}").status == 400
    assert server.request("GET", path_of(training)).json()["keep"] is False


def test_a_run_can_be_created_with_the_switch_on(server: Server) -> None:
    training = a_run(server, {"tinkercloud.dev/keep-samples": "true"})
    assert server.request("GET", path_of(training)).json()["keep"] is True

    kept(server, training, training.save_weights_and_get_sampling_client().result(), "at once")

    with pytest.raises(tinker.BadRequestError, match="expected 'true' or 'false'"):
        a_run(server, {"tinkercloud.dev/keep-samples": "perhaps"})


@pytest.mark.long
def test_a_killed_head_loses_no_sample_that_was_kept(server: Server) -> None:
    training = a_run(server, {"tinkercloud.dev/keep-samples": "true"})
    weights = training.save_weights_for_sampler("kept").result().path
    sampler = server.client().create_sampling_client(weights).result()
    kept(server, training, sampler, "before the head was killed")
    draw(sampler, "before the head was killed")

    server.kill_heads()

    newest, _ = kept(server, training, sampler, "after the head was killed")
    assert newest["step"] == 1
    assert "before the head was killed" in {each["prompt"] for each in found(server, training)}
