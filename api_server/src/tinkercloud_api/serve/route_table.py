"""All routes of the API server: how callers are authenticated, limits of bodies, audit, handlers.

`HotPaths` authenticates by `AREAS` and dispatches to `HOT_ROUTES`; FastAPI serves the others. The
rights of callers, the audit log, the OpenAPI document, the metrics and the test of objects of other
owners follow from the table. `make routes` prints it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from starlette.routing import BaseRoute, Route, compile_path

from tinkercloud_api.access import effects
from tinkercloud_api.access.effects import READS, READS_OF_ADMINS, WORKS, Effect
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
    BROWSER = "browser session"
    """By the cookie of a session that an API key has opened, by the handler."""
    LOGIN = "login"
    """At the OpenID provider, by the handler."""
    NONE = "none"
    """Everybody may call it."""

    @property
    def limits_failed_logins(self) -> bool:
        """Whether an address may send only so many unknown keys or cookies."""
        return self in {Authentication.KEY, Authentication.BROWSER}


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
    *((path, Authentication.BROWSER) for path in ("/console", "/console/")),
    ("/openapi.json", Authentication.NONE),
)
"""How callers of a path are authenticated, or of all paths below it if it ends with a slash.

Every route must be in an area.
"""
_PATHS = {path: each for path, each in AREAS if not path.endswith("/")}
_PREFIXES = tuple((path, each) for path, each in AREAS if path.endswith("/"))


class UndeclaredRouteError(Exception):
    """A route is in no area, doesn't declare its effect, or is of a kind that hides its paths."""


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
    effect: Effect
    """What its requests do."""
    names_object: bool
    """Whether its requests have a key and name an object that belongs to an owner."""
    handler: str
    """Module and name."""
    hot: HotRoute | None = None
    """The route, if FastAPI does not serve it."""

    @property
    def described_path(self) -> str:
        """The path as the OpenAPI document has it."""
        return self.path.replace(":path}", "}")


def table(routed: Iterable[BaseRoute]) -> list[Row]:
    """Return all routes, in the order in which they are matched.

    Args:
        routed: the routes of the FastAPI application.

    Raises:
        UndeclaredRouteError: a route is in no area, does not declare its effect, or is of a kind
            that hides its paths.
    """
    return [*map(_hot_row, HOT_ROUTES), *_framework_rows(routed)]


class Effects:
    """Finds what a request does by its method and path."""

    def __init__(self, served: Iterable[Row]) -> None:
        """Index the routes of a `table`."""
        self._exact: dict[str, dict[str, Effect]] = {}
        self._patterns: list[tuple[Callable[[str], object], Row]] = []
        self._admins_only: list[Callable[[str], object]] = []
        """Match the paths that only admins may read."""
        for row in served:
            if row.method in effects.SAFE_METHODS:
                if row.effect is READS_OF_ADMINS:
                    self._admins_only.append(compile_path(row.path)[0].match)
            elif "{" not in row.path:
                self._exact.setdefault(row.path, {})[row.method] = row.effect
            elif row.hot is None:
                self._patterns.append((compile_path(row.path)[0].match, row))

    def of(self, method: str, path: str, hot: Mapping[str, HotRoute]) -> Effect:
        """Return what a request does; `hot` are the routes outside FastAPI at its path."""
        if method in effects.SAFE_METHODS:
            is_for_admins = any(matches(path) for matches in self._admins_only)
            return READS_OF_ADMINS if is_for_admins else READS
        if (found := self._exact.get(path)) is None:
            kept = (each for each in hot.values() if each.method not in effects.SAFE_METHODS)
            found = {each.method: each.effect for each in kept}
            for matches, row in self._patterns:
                if matches(path):
                    found.setdefault(row.method, row.effect)
        if method in found:
            return found[method]
        # Another method at a path that the audit log does not keep is rejected, and no more.
        unkept = (each for each in found.values() if each.event is None)
        # Other requests of chat clients only sample.
        return next(unkept, effects.UNKNOWN if path.startswith(routes.PREFIX) else WORKS)


def _hot_row(route: HotRoute) -> Row:
    row = _row(route.method, route.path, route.limit.name, route.handler, route.effect)
    return replace(row, hot=route)


def _framework_rows(routed: Iterable[BaseRoute]) -> Iterator[Row]:
    for route in flat(routed):
        if not isinstance(route, Route):
            raise UndeclaredRouteError(
                f"{route}: the table can't list it; declare its paths as routes of their own"
            )
        for method in route.methods or ("*",):
            effect = effects.declared(method, route.endpoint)
            yield _row(method, route.path, JSON.name, route.endpoint, effect)


def _row(
    method: str, path: str, limit: str, handler: Callable[..., Any], effect: Effect | None
) -> Row:
    authentication = authentication_of(path)
    if authentication is None:
        raise UndeclaredRouteError(
            f"{method} {path}: the route is in no area; add its path to AREAS in"
            " tinkercloud_api/serve/route_table.py, with how its callers are authenticated"
        )
    has_key = authentication is Authentication.KEY
    if effect is None and has_key:
        raise UndeclaredRouteError(
            f"{method} {path}: what its requests do is not declared; decorate {_name_of(handler)}"
            " with @declares of tinkercloud_api/access/effects.py"
        )
    names_object = has_key and effects.names_object(handler)
    name = _name_of(handler)
    return Row(method, path, authentication, limit, effect or READS, names_object, name)


def _name_of(handler: object) -> str:
    named = handler if hasattr(handler, "__qualname__") else type(handler)
    module = str(getattr(named, "__module__", "")).removeprefix("tinkercloud_api.")
    return f"{module}.{getattr(named, '__qualname__', '')}"
