"""Messages about an invalid body are short, however many errors it has."""

from typing import Any

import pytest
from pydantic import ValidationError

from tinkercloud_api.routes.sessions.session_routes import CreateSession, Telemetry
from tinkercloud_protocol.requests.sampling_requests import SampleRequest
from tinkercloud_protocol.requests.training_requests import OptimStepRequest, SaveWeightsRequest
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import MAX_SHOWN_BODY_BYTES, describe, parse_json

MANY = 5000

SESSION: dict[str, Any] = {"sdk_version": "x"}
SAMPLE = {"sampling_session_id": "s:sample:0", "seq_id": 0}
SAVE = {"model_id": "s:train:0", "seq_id": 1}
CHUNK = {"type": "encoded_text", "tokens": [[]] * MANY}
PROMPT: dict[str, Any] = {"chunks": []}
TARGETS = {"dtype": "int64", "data": []}


@pytest.mark.parametrize(
    ("model", "content", "field"),
    [
        (CreateSession, SESSION | {"tags": [1] * MANY}, "tags.0"),
        (CreateSession, SESSION | {"user_metadata": dict.fromkeys(map(str, range(MANY)), 1)}, ""),
        (SaveWeightsRequest, SAVE | {"user_metadata": dict.fromkeys(map(str, range(65)), 1)}, ""),
        (Telemetry, {"events": [1] * MANY}, "events.0"),
        (Telemetry, {"events": [{}] * MANY}, "events"),
        (SampleRequest, SAMPLE | {"prompt": {"chunks": [CHUNK]}}, "prompt.chunks.0.tokens.0"),
        (SampleRequest, SAMPLE | {"prompt": {"chunks": [1] * MANY}}, "prompt.chunks.0"),
        (SampleRequest, SAMPLE | {"prompt": PROMPT, "sampling_params": {"stop": [[]] * MANY}}, ""),
        *(
            (SampleRequest, SAMPLE | {"prompt": PROMPT, "target_prompt_logprobs": targets}, "")
            for targets in (
                TARGETS | {"data": ["x"] * MANY},
                TARGETS | {"shape": [-1] * MANY},
                TARGETS | {"sparse_crow_indices": [2**63] * MANY},
                TARGETS | {"sparse_col_indices": [2**63] * MANY},
            )
        ),
    ],
)
def test_of_very_many_mistakes_the_first_is_remembered(
    model: Any, content: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValidationError) as raised:
        model.model_validate(content)

    assert raised.value.error_count() <= 3
    assert field in describe(raised.value)


def test_too_many_entries_of_metadata_are_counted() -> None:
    metadata = dict.fromkeys(map(str, range(65)), "x")

    with pytest.raises(ValidationError) as raised:
        CreateSession.model_validate(SESSION | {"user_metadata": metadata})

    reason = "user_metadata: has 65 entries; at most 64 are accepted"
    assert describe(raised.value) == reason


@pytest.mark.parametrize("padding", [0, MAX_SHOWN_BODY_BYTES])
def test_the_value_that_came_is_shown_unless_the_body_is_long(padding: int) -> None:
    body = b'{"model_id":"s:train:0","seq_id":"x"%b}' % (b" " * padding)

    with pytest.raises(InvalidRequest) as raised:
        parse_json(OptimStepRequest, body)

    assert raised.value.message.startswith("seq_id: Input should be a valid integer")
    assert ("(got 'x')" in raised.value.message) == (padding == 0)
