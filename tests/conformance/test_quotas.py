"""The limits of tenants, as users of the SDK see them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tinker.lib.queue_state_logger import QueueStateLogger

from tinkercloud_testing.sdk_steps import step
from tinkercloud_testing.servers import Server, a_server
from tinkercloud_testing.waiting import wait_until

MODEL = "tiny/llama"
TENANTS = {"research": {"owners": ["ada", "team-*"], "limits": {"models": 1}}}


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


def test_a_model_over_the_limit_waits_and_trains_once_another_session_ends(
    limited: Server, seen: list[tuple[str, str]]
) -> None:
    with limited.client(limited.new_key("ada")) as first:
        step(first.create_lora_training_client(MODEL, rank=4).result())
        second = limited.client(limited.new_key("team-blue"))
        creating = second.create_lora_training_client(MODEL, rank=4)
        wait_until(lambda: bool(seen), "the SDK to notice that the model waits")
        of_others = limited.client(limited.new_key("grace"))
        step(of_others.create_lora_training_client(MODEL, rank=4).result())

    losses = [step(creating.result()) for _ in range(3)]

    assert losses[2] < losses[0]
    state, reason = seen[0]
    assert state == "paused_capacity"
    assert "tenant 'research' uses 1 of 1 models (limits.models)" in reason
