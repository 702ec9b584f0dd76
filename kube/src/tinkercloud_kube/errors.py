"""Errors of requests to Kubernetes, classified by what the caller can do about them.

KubernetesError
  Unavailable      no answer, or one that asks for a retry (401, 429, 5xx)
  NotFound         404
  Conflict         409: the object changed in the meantime; read it again
    AlreadyExists  409: an object of that name exists
  Expired          410: the resource version is too old; list again
  Rejected         every other 4xx, and a field that no definition declares, which the API server
                   answers with 500: a retry does not help
  NotLeading       nothing was sent: another replica may hold the Lease
  NoCredentials    nothing was sent: no credentials for a cluster were found
"""

import json

_MAX_MESSAGE_LENGTH = 512
"""Characters of the API server's message in the text of an error, which ends up in conditions and
logs; `message` has all of it."""
_UNDECLARED = "field not declared in schema"
"""The API server's words about a field that it cannot apply."""


class KubernetesError(Exception):
    """A request to Kubernetes failed.

    Args:
        text: the request and its outcome.
        request: verb and path of the request; empty if there was none.
        status: HTTP status of the answer; None if there was no answer.
        message: the API server's own explanation, untruncated.
    """

    def __init__(
        self, text: str, *, request: str = "", status: int | None = None, message: str = ""
    ) -> None:
        super().__init__(text)
        self.request = request
        self.status = status
        self.message = message


class Unavailable(KubernetesError):
    """There was no answer, or one that asks for a retry."""


class NotFound(KubernetesError):
    """The object does not exist."""


class Conflict(KubernetesError):
    """The object, or another one that the request depends on, changed in the meantime."""


class AlreadyExists(Conflict):
    """An object of that name exists."""


class Expired(KubernetesError):
    """The resource version is too old to continue from; everything must be listed again."""


class Rejected(KubernetesError):
    """The request is not accepted, now or later."""


class NotLeading(KubernetesError):
    """Another replica may hold the Lease, so nothing was sent."""


class NoCredentials(KubernetesError):
    """There are no usable credentials for a cluster."""


def is_undeclared(message: str) -> bool:
    """Return whether a message of the API server says that a definition lacks a field."""
    return _UNDECLARED in message


def error_of(status: int, request: str, content: bytes) -> KubernetesError:
    """Return the error that an answer stands for.

    Args:
        status: HTTP status, 400 or above.
        request: verb and path, such as `GET /api/v1/nodes`.
        content: body of the answer. Only a Status object is quoted: other bodies come from
            proxies, and may contain anything.
    """
    message, reason = _explanation(content)
    text = f"{request}: {status} {message[:_MAX_MESSAGE_LENGTH]}"
    kind = _kind(status, message, reason)
    return kind(text, request=request, status=status, message=message)


def _kind(status: int, message: str, reason: str) -> type[KubernetesError]:
    # The API server answers 500 to a field that a definition does not declare, on every attempt.
    if is_undeclared(message):
        return Rejected
    # 401: the token has just been renewed, or the API server has just started.
    if status in {401, 429} or status >= 500:
        return Unavailable
    if status == 409 and reason == "AlreadyExists":
        return AlreadyExists
    return {404: NotFound, 409: Conflict, 410: Expired}.get(status, Rejected)


def _explanation(content: bytes) -> tuple[str, str]:
    """Return message and reason of a Status object; empty ones for any other content."""
    try:
        answer = json.loads(content)
    except ValueError:
        return "", ""
    if not isinstance(answer, dict) or answer.get("kind") != "Status":
        return "", ""
    return str(answer.get("message", "")), str(answer.get("reason", ""))
