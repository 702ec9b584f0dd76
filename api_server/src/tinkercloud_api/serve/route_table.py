"""All routes of the API server: how callers are authenticated, limits of bodies, audit, handlers.

`HotPaths` authenticates by `AREAS` and dispatches to `HOT_ROUTES`; FastAPI serves the others. The
OpenAPI document and the metrics use the same routes. `make routes` prints the table.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from starlette.routing import BaseRoute, Route

from tinkercloud_api.access import mutations
from tinkercloud_api.login import login_pages
from tinkercloud_api.serve.hot_routes import HOT_ROUTES, JSON, HotRoute
from tinkercloud_api.transfers import upload_urls
from tinkercloud_api.web.error_handlers import flat
from tinkercloud_protocol.responses import chat_errors
from tinkercloud_protocol.wire import routes


class Authentication(StrEnum):
    """How the caller of a route is authenticated."""

    KEY = "key"
    """By an API key or an access token, before anything else is done."""
    SIGNED_URL = "signed URL"
    """By the signature in the URL: of uploads before anything else is done, else by the handler."""
    LOGIN = "login"
    """At the OpenID provider, by the handler."""
    NONE = "none"
    """Everybody may call it."""


AREAS: tuple[tuple[str, Authentication], ...] = (
    (routes.PREFIX, Authentication.KEY),
    (f"{routes.PREFIX}healthz", Authentication.NONE),
    *((prefix, Authentication.KEY) for prefix in chat_errors.PREFIXES),
    (upload_urls.PREFIX, Authentication.SIGNED_URL),
    ("/downloads/", Authentication.SIGNED_URL),
    ("/traces/", Authentication.SIGNED_URL),
    ("/hf/", Authentication.NONE),
    *((path, Authentication.LOGIN) for path in login_pages.PATHS),
    *((path, Authentication.NONE) for path in ("/livez", "/readyz", "/healthz", "/health")),
    ("/openapi.json", Authentication.NONE),
)
"""How callers of a path are authenticated, or of all paths below it if it ends with a slash.

Every route must be in an area.
"""
_PATHS = {path: each for path, each in AREAS if not path.endswith("/")}
_PREFIXES = tuple((path, each) for path, each in AREAS if path.endswith("/"))


class UndeclaredRouteError(Exception):
    """A route is in no area, or is of a kind that hides its paths."""


def authentication_of(path: str) -> Authentication | None:
    """Return how callers of a path are authenticated; None if it is in no area."""
    for prefix, authentication in _PREFIXES:
        if path.startswith(prefix):
            return _PATHS.get(path, authentication)
    return _PATHS.get(path)


@dataclass(frozen=True, slots=True)
class Row:
    """A route in the table."""

    method: str
    """`*` if the handler decides."""
    path: str
    """With fields in braces."""
    authentication: Authentication
    limit: str
    """The largest body."""
    event: str
    """In the audit log; empty for requests that it does not keep."""
    handler: str
    """Module and name."""


def table(routed: Iterable[BaseRoute]) -> list[Row]:
    """Return all routes by path and method.

    Args:
        routed: the routes of the FastAPI application.

    Raises:
        UndeclaredRouteError: a route is in no area, or is of a kind that hides its paths.
    """
    rows = [*map(_hot_row, HOT_ROUTES), *_framework_rows(routed)]
    return sorted(rows, key=lambda row: (row.path, row.method))


def _hot_row(route: HotRoute) -> Row:
    return _row(route.method, route.path, route.limit.name, route.handler)


def _framework_rows(routed: Iterable[BaseRoute]) -> Iterator[Row]:
    for route in flat(routed):
        if not isinstance(route, Route):
            raise UndeclaredRouteError(
                f"{route}: the table can't list it; declare its paths as routes of their own"
            )
        for method in route.methods or ("*",):
            yield _row(method, route.path, JSON.name, route.endpoint)


def _row(method: str, path: str, limit: str, handler: object) -> Row:
    authentication = authentication_of(path)
    if authentication is None:
        raise UndeclaredRouteError(
            f"{method} {path}: the route is in no area; add its path to AREAS in"
            " tinkercloud_api/serve/route_table.py, with how its callers are authenticated"
        )
    has_caller = authentication is Authentication.KEY or path.startswith(upload_urls.PREFIX)
    event = mutations.audited_event(method, path) if has_caller else None
    return Row(method, path, authentication, limit, event or "", _name_of(handler))


def _name_of(handler: object) -> str:
    named = handler if hasattr(handler, "__qualname__") else type(handler)
    module = str(getattr(named, "__module__", "")).removeprefix("tinkercloud_api.")
    return f"{module}.{getattr(named, '__qualname__', '')}"
