"""The cookie that holds the session of a browser in the console."""

from starlette.requests import HTTPConnection
from starlette.responses import Response

from tinkercloud_protocol.wire.asgi import Scope

CONSOLE = "/console"
"""The path of the console. Browsers send the cookie to it and below it only."""
_NAME = "tinkercloud-console"


def session_token(scope: Scope) -> str | None:
    """Return the token in the cookie of a browser's session; None without a cookie."""
    return HTTPConnection(scope).cookies.get(_NAME)


def set_session(answer: Response, token: str, *, is_https: bool) -> None:
    """Make a browser keep its session.

    Args:
        answer: the response to the browser.
        token: what the cookie holds.
        is_https: whether browsers use https.
    """
    answer.set_cookie(_NAME, token, path=CONSOLE, secure=is_https, httponly=True, samesite="strict")


def forget_session(answer: Response) -> None:
    """Make a browser forget its session."""
    answer.delete_cookie(_NAME, path=CONSOLE)
