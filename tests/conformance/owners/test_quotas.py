"""The limits of tenants, as users of the SDK see them."""

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import tinker
from tinker import types
from tinker.lib.queue_state_logger import QueueStateLogger

from tinkercloud_testing.clients.sdk_steps import ADAM, a_text, step
from tinkercloud_testing.harness.waiting import wait_until
from tinkercloud_testing.serving.servers import Server, a_server

MODEL = "tiny/llama"
TENANTS = {
    "research": {"owners": ["ada", "team-*"], "limits": {"models": 1}},
    "slow": {"owners": ["slow-*"], "limits": {"tokensPerMinute": 6000}},
    "small": {"owners": ["small-*"], "limits": {"storageBytes": 1}},
    "kept": {"owners": ["kept-*"], "limits": {"models": 1}},
}


@pytest.fixture(scope="module")
def limited(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server on which the owners of a tenant may have one model together."""
    settings = {
        "TINKERCLOUD_TENANTS": json.dumps(TENANTS),
        "TINKERCLOUD_TIMINGS__LONG_POLL_SECONDS": "0.5",
    }
    with a_server(tmp_path_factory.mktemp("limited"), {MODEL: model_folder}, settings) as running:
        yield running


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the queue states that the SDK notices, with their reasons."""
    found: list[tuple[str, str]] = []

    def note(_logger: QueueStateLogger, state: object, reason: str | None) -> None:
        found.append((str(getattr(state, "value", state)), str(reason)))

    monkeypatch.setattr(QueueStateLogger, "on_queue_state_change", note)
    return found


def paused(seen: list[tuple[str, str]], why: str = "paused_capacity") -> list[str]:
    """Return the reasons of a queue state that name the tenant."""
    return [reason for state, reason in seen if state == why and "tenant" in reason]


def test_a_model_over_the_limit_waits_and_trains_once_another_session_ends(
    limited: Server, seen: list[tuple[str, str]]
) -> None:
    ada, team_blue = limited.new_key("ada"), limited.new_key("team-blue")
    with limited.client(team_blue) as second:
        with limited.client(ada) as first:
            step(first.create_lora_training_client(MODEL, rank=4).result())
            creating = second.create_lora_training_client(MODEL, rank=4)
            wait_until(lambda: bool(paused(seen)), "the SDK to notice that the model waits")
            of_others = limited.client(limited.new_key("grace"))
            step(of_others.create_lora_training_client(MODEL, rank=4).result())

        losses = [step(creating.result()) for _ in range(3)]

    assert losses[2] < losses[0]
    assert "tenant 'research' uses 1 of 1 models (limits.models)" in paused(seen)[0]


def test_a_waiting_model_gets_the_place_of_one_that_is_deleted(
    limited: Server, seen: list[tuple[str, str]]
) -> None:
    key = limited.new_key("team-green")
    with limited.client(key) as client, limited.client(limited.new_key("ada")) as other:
        first = client.create_lora_training_client(MODEL, rank=4).result()
        step(first)
        creating = [each.create_lora_training_client(MODEL, rank=4) for each in (client, other)]
        wait_until(lambda: len(paused(seen)) > 1, "the SDK to notice that both models wait")

        for waiting in creating:
            limited.post("delete_model", {"model_id": first.model_id}, key=key)
            first = waiting.result()
            assert step(first) > 0


def test_over_the_tokens_of_a_minute_requests_wait_in_order_and_others_do_not(
    limited: Server, seen: list[tuple[str, str]]
) -> None:
    slow = limited.client(limited.new_key("slow-eve"))
    training = slow.create_lora_training_client(MODEL, rank=4).result()
    text = a_text(list(range(5, 106)), weights=[1.0] * 100)

    first = training.forward_backward([text] * 66, "cross_entropy")
    second = training.forward_backward([text], "cross_entropy")
    stepping = training.optim_step(ADAM)
    first.result()
    other = limited.client(limited.new_key("grace"))
    step(other.create_lora_training_client(MODEL, rank=4).result())
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([5, 6, 7])
    sampled = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4)).result()

    assert second.result().metrics["loss:sum"] > 0
    stepping.result()
    assert 1 <= len(sampled.sequences[0].tokens) <= 4
    reasons = paused(seen, "paused_rate_limit")
    assert "limits.tokensPerMinute of tenant 'slow' is 6000" in reasons[0]
    assert "starts in" in reasons[0]
    check_pauses(limited, training)


def check_pauses(limited: Server, training: tinker.TrainingClient) -> None:
    """Check that of the requests of a run, only the second has waited for tokens."""
    timeline = limited.request("GET", f"/api/v1/runs/{training.model_id}/timeline").json()
    trained = [each for each in timeline["requests"] if each["target"] == training.model_id]
    pauses = {each["request_id"]: each["paused_seconds"] for each in trained}
    assert [pause > 0 for pause in pauses.values()] == [False, False, True, False]
    url = limited.rest().export_session_trace(training.holder.get_session_id()).result()
    events = limited.request("GET", urlsplit(url).path).json()["traceEvents"]
    args = [event["args"] for event in events if event["name"] == "rate limit"]
    (pause,) = [each for each in args if each["request_id"] in pauses]
    assert pause["paused_seconds"] == pauses[pause["request_id"]]


def test_over_the_storage_limit_of_a_tenant_new_checkpoints_are_refused_and_training_continues(
    limited: Server,
) -> None:
    keys = [limited.new_key(owner) for owner in ("small-ada", "small-bob")]
    ada, bob = (
        limited.client(key).create_lora_training_client(MODEL, rank=4).result() for key in keys
    )
    path = ada.save_state("first").result().path

    with pytest.raises(tinker.RequestFailedError, match=r"tenant 'small' use \d+ of 1 bytes"):
        bob.save_state("second").result()

    step(bob)
    ada.save_state("first", overwrite=True).result()
    limited.rest(keys[0]).delete_checkpoint_from_tinker_path(path).result()
    bob.save_state("second").result()


def test_owners_see_the_limits_of_their_tenant_and_what_is_used(limited: Server) -> None:
    key = limited.new_key("team-red")
    with limited.client(key) as client:
        client.create_lora_training_client(MODEL, rank=4).result()

        quota = limited.request("GET", "/api/v1/usage", key=key).json()["quota"]
        printed = limited.command("usage", "--base-url", limited.url, "--api-key", key)

    models = next(each for each in quota["limits"] if each["name"] == "models")
    assert (quota["tenant"], models["used"], models["limit"]) == ("research", 1, 1)
    assert "tenant research" in printed
    assert limited.request("GET", "/api/v1/usage").json()["quota"] is None


def test_a_run_without_its_client_waits_for_the_same_limit_after_a_restart(limited: Server) -> None:
    key = limited.new_key("kept-ada")
    (first, created), (second, creating) = (a_run(limited, key) for _ in range(2))
    assert limited.result(created, key=key).status == 200
    before = why_waiting(limited, second)

    limited.kill()
    limited.start()

    assert "tenant 'kept' uses 1 of 1 models (limits.models); this is number 1" in before
    assert why_waiting(limited, second).startswith(f"{before}; no request waits for it")
    limited.post("delete_model", {"model_id": first}, key=key)
    assert limited.result(creating, key=key).status == 200


def a_run(server: Server, key: str) -> tuple[str, str]:
    """Create a run like a client that is gone then; return its id, and that of the request."""
    made = server.post("create_session", {"sdk_version": "t"}, key=key).json()
    model = {"model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    wanted = {"session_id": made["session_id"], **model}
    answer = server.post("create_model", wanted, key=key).json()
    return str(answer["model_id"]), str(answer["request_id"])


def why_waiting(server: Server, run_id: str) -> str:
    """Return what the next request of a run waits for, once that is known."""

    def found() -> dict[str, object]:
        return server.request("GET", f"/api/v1/runs/{run_id}").json()

    wait_until(lambda: found()["queue_state"] == "paused_capacity", "the run to wait for a quota")
    return str(found()["queue_reason"])
