"""Calls of the OpenAPI document with any values: the server never fails because of them."""

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.schemas import APIOperation

from tinkercloud_testing.clients.raw_run import Run
from tinkercloud_testing.harness.fuzzing import Cases
from tinkercloud_testing.harness.waiting import PATIENCE_SECONDS
from tinkercloud_testing.serving.servers import API_KEY, Server

Operation = APIOperation[Any, Any, Any, Any]
Case = schemathesis.Case[Any]

_ENDS_THE_KEY = ("delete", "/api/v1/auth/apikey/me")
_CREDENTIALS = ("x-api-key", "authorization")


@pytest.fixture(scope="module")
def ids(server: Server) -> dict[str, str]:
    """Return existing ids and paths by the names of their fields, of a run that may end."""
    victim = Run(server)
    victim.step()
    saved = victim.outcome(victim.send("save_weights", path="w"))
    path = str(saved["path"])
    return {
        "session_id": victim.session,
        "model_id": victim.model_id,
        "run_id": victim.model_id,
        "training_run_id": victim.model_id,
        "checkpoint_id": path.split("/", 3)[3],
        "path": path,
        "model_path": path,
        "tinker_path": path,
        "request_id": str(
            victim.send("optim_step", adam_params={"learning_rate": 0.1}).json()["request_id"]
        ),
    }


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as opened:
        yield opened


def test_no_call_of_the_openapi_document_makes_the_server_fail(
    server: Server, session: requests.Session, ids: dict[str, str], cases: Cases
) -> None:
    document = server.request("GET", "/openapi.json").json()
    found = schemathesis.openapi.from_dict(document).get_all_operations()
    # An operation that can't be read raises here.
    operations = [result.ok() for result in found]  # type: ignore[union-attr]
    wanted = [each for each in operations if (each.method, each.path) != _ENDS_THE_KEY]
    assert len(wanted) > 40

    for operation in wanted:
        _call(server, session, operation, ids, cases)


def _call(
    server: Server,
    session: requests.Session,
    operation: Operation,
    ids: dict[str, str],
    cases: Cases,
) -> None:
    valid = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    invalid = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    count = max(3, cases.number // 40)

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=valid | invalid, existing=st.booleans())
    def check(case: Case, *, existing: bool) -> None:
        for name in [each for each in case.headers or {} if each.lower() in _CREDENTIALS]:
            del case.headers[name]
        if existing:
            _name_existing(case, ids)

        response = case.call(
            base_url=server.url,
            session=session,
            headers={"X-API-Key": API_KEY},
            timeout=PATIENCE_SECONDS,
        )

        assert response.status_code < 500, (case.as_curl_command(), response.text)
        if response.status_code >= 400 and operation.method != "head":
            assert response.json(), "an error without a reason"
        cases.count()

    check()


def _name_existing(case: Case, ids: dict[str, str]) -> None:
    """Replace ids of a call by existing ones, at the places where it has ids."""
    for values in (case.path_parameters, case.query, case.body):
        if isinstance(values, dict):
            values.update({name: ids[name] for name in values.keys() & ids.keys()})
