"""A signed URL allows what it was signed for, until it expires, and nothing else."""

from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tinkercloud_api.transfers.signed_urls import (
    Grant,
    InvalidSignature,
    UrlGone,
    check,
    microseconds,
    signature,
    signed_url,
)
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath, parse_kind

KEY = b"a key of the tests"
PATHS = st.builds(
    CheckpointPath,
    st.sampled_from(["a:train:0", "b:train:12"]),
    st.sampled_from(CheckpointKind),
    st.sampled_from(["x", "step-1", "a=b+c@d,e"]),
)
TEXT = st.text(max_size=12).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text))
GRANTS = st.builds(
    Grant,
    path=PATHS,
    file=st.sampled_from(["adapter_config.json", "model.safetensors.age", "checkpoint.tar"]),
    saved=st.integers(0, 1 << 53),
    owner=TEXT,
    expires=st.integers(1_000_000, 4_000_000_000),
)


def read(url: str) -> tuple[Grant, str]:
    """Read a URL in the way of the server's framework."""
    parts = urlsplit(url)
    run_id, kind, name, file = (unquote(each) for each in parts.path.split("/")[-4:])
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    path = CheckpointPath(run_id, parse_kind(kind), name)
    terms = int(query["saved"]), query["owner"], int(query["expires"])
    return Grant(path, file, *terms), query["signature"]


@given(GRANTS)
def test_a_url_states_its_grant_and_is_valid_until_it_expires(grant: Grant) -> None:
    read_grant, given_signature = read(signed_url("https://host/base", KEY, grant))

    assert read_grant == grant
    end = datetime.fromtimestamp(grant.expires, UTC)
    check(KEY, read_grant, given_signature, end - timedelta(seconds=1))
    with pytest.raises(UrlGone, match="expired"):
        check(KEY, read_grant, given_signature, end)


@given(GRANTS, GRANTS)
def test_the_signature_of_one_grant_is_wrong_for_every_other(one: Grant, other: Grant) -> None:
    assume(one != other)

    with pytest.raises(InvalidSignature, match="signature: does not match"):
        check(KEY, other, signature(KEY, one), datetime.fromtimestamp(0, UTC))


@given(GRANTS, st.text(max_size=70))
def test_any_other_text_is_no_signature(grant: Grant, text: str) -> None:
    assume(text != signature(KEY, grant))

    with pytest.raises(InvalidSignature):
        check(KEY, grant, text.encode(errors="replace").decode(), datetime.now(UTC))


def test_servers_with_another_key_reject_it() -> None:
    grant = Grant(CheckpointPath("a:train:0", CheckpointKind.EXTERNAL, "x"), "f", 1, "me", 1 << 40)

    with pytest.raises(InvalidSignature):
        check(b"another key", grant, signature(KEY, grant), datetime.now(UTC))


def test_checkpoints_that_were_saved_within_a_millisecond_differ() -> None:
    moment = datetime(2026, 11, 25, 12, 0, 0, 123456, tzinfo=UTC)

    assert microseconds(moment + timedelta(microseconds=1)) - microseconds(moment) == 1
