"""What heads say about themselves."""

import json
from typing import Any

from tinkercloud_protocol.launch import HeadStatus

CAPACITY = {"models": 1, "model_bytes": 10, "pass_bytes": 0, "free_bytes": 30}
STATUS: dict[str, Any] = {
    "head": "head",
    "generation": "0",
    "model_name": "Org/Model",
    "ready": True,
    "models": ["one"],
    "samplers": 0,
    "pending_requests": 0,
    "idle_seconds": 0.0,
}


def test_what_a_head_of_a_later_release_says_in_addition_is_ignored() -> None:
    known = STATUS | {"capacity": CAPACITY}
    later = STATUS | {"capacity": CAPACITY | {"later": [1]}, "later": {"field": 1}}

    read = HeadStatus.model_validate_json(json.dumps(later))

    assert read == HeadStatus.model_validate(known)
    assert read.capacity is not None
    assert read.capacity.free_bytes == 30
