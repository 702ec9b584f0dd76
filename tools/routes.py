"""Prints all routes of the API server, of session heads and of the operator; `make routes` runs it.

A test compares the output with tests/house/routes.txt: check how callers of a new route are
authenticated, then run `make routes > tests/house/routes.txt`.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tinkercloud_api.access import failed_logins
from tinkercloud_api.config.sections.login_settings import OidcSettings
from tinkercloud_api.config.settings import Settings
from tinkercloud_api.providers.local.local_provider import LocalProvider
from tinkercloud_api.serve.api_app import Application
from tinkercloud_operator.run import probes
from tinkercloud_worker.head.serve.head_app import ROUTES

HEADER = ("METHOD", "PATH", "AUTHENTICATION", "BODY", "FAILED LOGINS", "AUDIT", "HANDLER")


def api_server_rows() -> list[tuple[str, ...]]:
    """Return the routes of an API server with logins."""
    oidc = OidcSettings(
        issuer="https://login.example.com",
        client_id="tinkercloud",
        client_secret_file=Path("secret"),
        allow_all_accounts=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            state_dir=Path(folder), oidc=oidc, public_url="https://tinkercloud.example.com"
        )
        app = Application(settings, LocalProvider([], settings))
    return [
        (
            row.method,
            row.path,
            "admin key" if row.effect.needs_admin else row.authentication,
            row.limit,
            failed_logins.LIMIT if row.authentication.limits_failed_logins else "",
            row.effect.event or "",
            row.handler,
        )
        for row in sorted(app.route_table, key=lambda row: (row.path, row.method))
    ]


def head_rows() -> list[tuple[str, ...]]:
    """Return the routes of a head."""
    return [
        (
            route.method,
            route.path,
            "token" if route.needs_token else "none",
            route.limit.name,
            "",
            "",
            route.name,
        )
        for route in sorted(ROUTES, key=lambda route: (route.path, route.method))
    ]


def operator_rows() -> list[tuple[str, ...]]:
    """Return the routes of the operator."""
    return [
        ("GET", path, "none", "", "", "", handler.__qualname__)
        for path, handler in probes.ROUTES.items()
    ]


def text() -> str:
    """Return all tables."""
    tables = [
        ("API server", api_server_rows()),
        ("Session head", head_rows()),
        ("Operator", operator_rows()),
    ]
    return "\n".join(f"{title}\n{_aligned([HEADER, *rows])}" for title, rows in tables)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "".join(f"{line.rstrip()}\n" for line in lines)


if __name__ == "__main__":
    print(text(), end="")
