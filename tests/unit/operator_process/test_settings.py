"""Operator settings: an invalid value ends the process with a message."""

import pytest

from tinkercloud_operator.__main__ import main


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("LEASE_SECONDS", "1", "settings: lease_seconds: .* greater than or equal to 3 .got '1'"),
        ("LEASE_SECOND", "9", "settings: .*TINKERCLOUD_OPERATOR_LEASE_SECOND is not a setting"),
        ("OUTGOING_PORTS", "443,80", "settings: error parsing value for field .outgoing_ports"),
    ],
)
def test_an_invalid_setting_ends_the_operator_with_a_message(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(f"TINKERCLOUD_OPERATOR_{name}", value)

    with pytest.raises(SystemExit, match=message):
        main()
