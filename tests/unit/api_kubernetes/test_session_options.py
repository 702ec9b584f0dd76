"""Tags and metadata under the prefix: parsing, rejection and precedence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkercloud_api.providers.session_options import SessionOptions, collect_options
from tinkercloud_protocol.wire.errors import InvalidRequest


def test_all_options_are_read() -> None:
    metadata = {
        "tinkercloud.dev/session": "declared",
        "tinkercloud.dev/queue": "research",
        "tinkercloud.dev/priority": "high",
        "tinkercloud.dev/idle-timeout": "600",
        "tinkercloud.dev/idle-action": "delete",
        "tinkercloud.dev/keep-samples": "True",
        "somebody-elses": "business",
    }

    options = SessionOptions.read(metadata)

    assert options == SessionOptions(
        "declared", "research", "high", 600, "Delete", keep_samples=True
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tinkercloud.dev/gpus", "8", "valid options: tinkercloud.dev/session, .*idle-action"),
        ("tinkercloud.dev/queue", "Not A Name", "not a valid name of a Kubernetes object"),
        ("tinkercloud.dev/session", "", "not a valid name of a Kubernetes object"),
        ("tinkercloud.dev/idle-timeout", "10m", "whole number of seconds from 60"),
        ("tinkercloud.dev/idle-timeout", "59", "whole number of seconds from 60"),
        ("tinkercloud.dev/idle-action", "explode", "expected 'suspend' or 'delete'"),
        ("tinkercloud.dev/keep-samples", "1", "expected 'true' or 'false'"),
    ],
)
def test_invalid_options_are_rejected_by_name(key: str, value: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{key}.*{message}"):
        SessionOptions.read({key: value})


def test_run_metadata_takes_precedence_over_session_metadata_and_tags() -> None:
    tags = ["mine", "tinkercloud.dev/queue=a", "tinkercloud.dev/priority=a"]
    of_session = {"tinkercloud.dev/queue": "b", "tinkercloud.dev/idle-timeout": "60"}
    of_run = {"tinkercloud.dev/queue": "c", "other": "x"}

    entries = collect_options(tags, of_session, None, of_run)

    assert SessionOptions.read(entries) == SessionOptions(queue="c", priority="a", idle_timeout=60)
    assert "other" not in entries


def test_a_tag_without_a_value_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match=r"use tinkercloud\.dev/queue=VALUE"):
        collect_options(["tinkercloud.dev/queue"])


def test_contradictory_tags_are_rejected() -> None:
    with pytest.raises(InvalidRequest, match="to both 'a' and 'b'"):
        collect_options(["tinkercloud.dev/queue=a", "tinkercloud.dev/queue=b"])


@given(st.lists(st.text().filter(lambda tag: not tag.startswith("tinkercloud.dev/"))))
def test_tags_outside_the_prefix_are_ignored(tags: list[str]) -> None:
    assert collect_options(tags) == {}
