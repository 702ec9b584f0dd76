"""What heads say about themselves."""

import json
from typing import Any

from tinkercloud_protocol.heads.capacity import HeadCapacity
from tinkercloud_protocol.heads.launch import HeadStatus

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


def test_the_place_of_idle_models_makes_no_room_for_one_that_is_larger_than_the_device() -> None:
    capacity = HeadCapacity(
        2, 1000, 0, 0, with_idle_bytes=-500, swap_bytes=100_000, device_bytes=9999
    )

    assert capacity.more_of(9999) > 0
    assert capacity.more_of(10_000) == 0
