"""The address of the server that commands call."""

import pytest
import typer

from tinkercloud_api.commands.common.shared import server_url


@pytest.mark.parametrize("url", ["127.0.0.1:18731", "tinker.example.com", "ftp://a", ""])
def test_an_address_without_a_scheme_is_named_with_what_it_needs(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        server_url(url)

    printed = " ".join(capsys.readouterr().err.split())
    assert "TINKER_BASE_URL" in printed
    assert "starts with http:// or https://" in printed


def test_the_slash_at_the_end_of_an_address_is_removed() -> None:
    assert server_url("HTTP://127.0.0.1:8000/base/") == "HTTP://127.0.0.1:8000/base"
