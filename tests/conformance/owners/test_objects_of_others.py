"""No call finds an object of another owner, although the runs of both are on one head."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkercloud_api.config.settings import Settings
from tinkercloud_api.serve.api_app import Application
from tinkercloud_testing.clients.objects_of_others import all_calls, check_none_is_found, objects_of
from tinkercloud_testing.clients.sdk_steps import step
from tinkercloud_testing.serving.providers import OneHead
from tinkercloud_testing.serving.servers import Server, a_server
from tinkercloud_testing.small_models.chat import CHAT_MODEL, a_chat_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server with one model, so that all runs are on one head."""
    folder = a_chat_model(tmp_path_factory.mktemp("models") / "chat")
    settings = {"TINKERCLOUD_PROGRAMS__ALLOW_CODE": "true"}
    with a_server(tmp_path_factory.mktemp("state"), {CHAT_MODEL: folder}, settings) as running:
        yield running


@pytest.fixture(scope="module")
def theirs(server: Server) -> dict[str, str]:
    """Return the names of the objects of an owner, who has one of each kind."""
    training = server.client().create_lora_training_client(CHAT_MODEL, rank=4).result()
    return objects_of(training, server, {"source": "print('theirs')"})


def test_an_object_of_another_owner_on_the_same_head_is_like_one_that_does_not_exist(
    server: Server, theirs: dict[str, str]
) -> None:
    key = server.new_key("stranger")
    own = server.client(key).create_lora_training_client(CHAT_MODEL, rank=4).result()
    step(own)

    assert len(server.head_pids()) == 1
    check_none_is_found(server, theirs, own, key)


def test_the_calls_of_the_test_are_all_routes_that_name_an_object(tmp_path: Path) -> None:
    table = Application(Settings(state_dir=tmp_path), OneHead()).route_table
    routes = {f"{row.method} {row.described_path}" for row in table if row.names_object}

    assert {call.route.partition("?")[0] for call in all_calls(defaultdict(str))} == routes
    assert len(routes) > 50
