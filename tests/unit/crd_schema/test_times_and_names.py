"""Times of Kubernetes, and the names of a session's children."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from tinkercloud_crds.names import Names
from tinkercloud_crds.times import parse_time


@pytest.mark.parametrize(
    "text", [None, "", "soon", "2026-01-01", "2026-01-01T12:00:00", "2026-01-01 12:00"]
)
def test_a_text_that_is_no_time_or_has_no_offset_is_none(text: str | None) -> None:
    assert parse_time(text) is None


def test_a_time_keeps_its_offset_and_its_fraction() -> None:
    offset = timezone(timedelta(hours=2))

    assert parse_time("2026-01-01T12:00:00Z") == datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert parse_time("2026-01-01T12:00:00.25+02:00") == datetime(
        2026, 1, 1, 12, 0, 0, 250_000, tzinfo=offset
    )


def test_the_names_of_children_are_stable_because_live_sessions_have_them() -> None:
    names = Names("one")

    assert names.token_secret == "one-token"
    assert names.head_service == "one-head"
    assert names.ray_head_service == "one-head-svc"
    assert names.engines == "one-samplers"
    assert names.head_config == "one-config"
    assert names.claim_template("gpu.nvidia.com", 2) == "one-404f2a79-gpus"
