"""No call finds an object of another owner, although the runs of both are on one head."""

from collections.abc import Iterator

import pytest

from tinkercloud_testing.chat import CHAT_MODEL, a_chat_model
from tinkercloud_testing.objects_of_others import all_calls, check_none_is_found, objects_of
from tinkercloud_testing.sdk_steps import step
from tinkercloud_testing.servers import Server, a_server

WITHOUT_OBJECT = frozenset(
    {
        # They list objects of the caller, or create one.
        *("GET /api/v1/sessions", "GET /api/v1/session_usage", "GET /api/v1/usage"),
        *(
            "GET /api/v1/checkpoints",
            "GET /api/v1/checkpoints/uploads",
            "GET /api/v1/programs",
            "GET /api/v1/projects",
        ),
        *("POST /api/v1/projects", "GET /api/v1/audit", "GET /api/v1/billing/usage/events"),
        *("GET /oai/api/v1/models", "GET /anthropic/api/v1/models"),
        "POST /api/v1/cleanup_futures",
        # They concern the caller's own key.
        *("POST /api/v1/auth/token", "GET /api/v1/auth/apikey/me", "DELETE /api/v1/auth/apikey/me"),
        # They are the same for everybody.
        *("POST /api/v1/client/config", "POST /api/v1/client/dynamic_config"),
        *("GET /api/v1/get_server_capabilities", "GET /api/v1/get_tokenizer"),
        "POST /api/v1/telemetry",
        *("GET /livez", "GET /readyz", "GET /healthz", "GET /health"),
        *("GET /api/v1/healthz", "GET /api/v1/health"),
        "GET /hf/api/models/{repo}",
        "GET /hf/api/models/{repo}/revision/{revision}",
        "GET /hf/api/models/{repo}/tree/{revision}",
        "GET /hf/api/models/{repo}/tree/{revision}/{folder}",
        *("GET /hf/{repo}/resolve/{revision}/{name}", "HEAD /hf/{repo}/resolve/{revision}/{name}"),
        # They accept a signed URL instead of a key.
        *("GET /downloads/{run_id}/{kind}/{name}/{file}", "GET /traces/{token}"),
    }
)
"""Calls that name no object of an owner."""


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


def test_the_calls_of_the_test_are_all_that_name_an_object(
    server: Server, theirs: dict[str, str]
) -> None:
    paths = server.request("GET", "/openapi.json").json()["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}

    named = {call.route.partition("?")[0] for call in all_calls(theirs)}

    assert named == served - WITHOUT_OBJECT
    assert served >= WITHOUT_OBJECT
