"""Settings of the operator: what is not acceptable ends it with a sentence."""

import pytest

from tinkercloud_operator.__main__ import main


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("LEASE_SECONDS", "1", "settings: lease_seconds: .* greater than or equal to 3 .got '1'"),
        ("LEASE_SECOND", "9", "settings: .*TINKERCLOUD_OPERATOR_LEASE_SECOND is not a setting"),
        ("OUTGOING_PORTS", "443,80", "settings: error parsing value for field .outgoing_ports"),
    ],
)
def test_a_setting_that_is_not_acceptable_ends_the_operator_with_what_it_is(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(f"TINKERCLOUD_OPERATOR_{name}", value)

    with pytest.raises(SystemExit, match=told):
        main()
