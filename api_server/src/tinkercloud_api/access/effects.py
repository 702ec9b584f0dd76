"""What a request does: for the rights of its caller, for the audit log and for tests.

Each route declares it where it is defined, and the server does not start with one that doesn't.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
"""Their requests read."""
_EFFECT = "tinkercloud_effect"
_NAMES_NO_OBJECT = "tinkercloud_names_no_object"


@dataclass(frozen=True, slots=True)
class Effect:
    """What the requests of a route do."""

    is_mutation: bool
    """Whether they change something or use the engine."""
    event: str | None = None
    """In the audit log, `<resource>_<action>` as in `tinker.types.AuditLogEntry`; None: the log
    does not keep them."""
    needs_admin: bool = False
    """Whether only admins may send them."""


READS = Effect(is_mutation=False)
"""They return what the caller may see."""
WORKS = Effect(is_mutation=True)
"""They train, sample or report. They are too many for the audit log; the ledger of usage counts
what they compute."""
READS_OF_ADMINS = Effect(is_mutation=False, needs_admin=True)
"""They return what only admins may see."""
UNKNOWN = Effect(is_mutation=True, event="unknown_request")
"""No route serves them: they might do anything."""

EndpointT = TypeVar("EndpointT", bound=Callable[..., Any])


def changes(event: str) -> Effect:
    """Return the effect of requests that the audit log keeps as this event."""
    return Effect(is_mutation=True, event=event)


def shows(event: str) -> Effect:
    """Return the effect of requests that change nothing, and that the audit log keeps as this."""
    return Effect(is_mutation=False, event=event)


def administers(event: str) -> Effect:
    """Return the effect of requests that only admins may send, kept as this event."""
    return Effect(is_mutation=True, event=event, needs_admin=True)


def declares(effect: Effect) -> Callable[[EndpointT], EndpointT]:
    """Declare what the requests of an endpoint do.

    GET requests read, and need a declaration only if they are `READS_OF_ADMINS`.
    """

    def declare(endpoint: EndpointT) -> EndpointT:
        vars(endpoint)[_EFFECT] = effect
        return endpoint

    return declare


def names_no_object(endpoint: EndpointT) -> EndpointT:
    """Declare that the requests of an endpoint name no object that belongs to an owner.

    Of all others, a test checks that they do not find the objects of another owner.
    """
    vars(endpoint)[_NAMES_NO_OBJECT] = True
    return endpoint


def declared(method: str, endpoint: Callable[..., Any]) -> Effect | None:
    """Return what the requests of a method do at an endpoint; None if that is not declared."""
    found: Effect | None = getattr(endpoint, _EFFECT, None)
    if method in SAFE_METHODS:
        return found if found is READS_OF_ADMINS else READS
    return found


def names_object(endpoint: Callable[..., Any]) -> bool:
    """Return whether the requests of an endpoint name an object that belongs to an owner."""
    return not hasattr(endpoint, _NAMES_NO_OBJECT)
