"""Sessions of browsers in the console: a browser has the rights of the API key that opened it.

A cookie holds 256 random bits, of which the catalog has the SHA-256. Forms hold a token that is
derived from them, so that no other site can send one.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from urllib.parse import urlsplit

from tinkercloud_api.access.auth import Authenticator, Principal, hash_key
from tinkercloud_api.access.failed_logins import Throttle
from tinkercloud_api.catalog.access.console_tokens import ConsoleTokens
from tinkercloud_api.catalog.schema.tables import ConsoleToken
from tinkercloud_protocol.wire.errors import Forbidden, Unauthenticated

_LINK = timedelta(minutes=10)
_SESSION = timedelta(days=7)
_FORM = b"form"
_LOGGED_OUT = "log in to see this page"


def is_of_this_site(headers: Mapping[str, str], public_url: str | None) -> bool | None:
    """Return whether a form that needs no session is of a page of this server.

    Such a form of another site could log a browser in as somebody else. Browsers name the site in
    `Origin`, in `Sec-Fetch-Site` or in both.

    Args:
        headers: those of its request.
        public_url: address of this server for browsers, if that is not in the header Host.

    Returns:
        None if no header says so, as from programs and very old browsers.
    """
    own = {headers.get("host"), _host_of(public_url or "")} - {None, ""}
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and _host_of(origin) not in own:
        return False
    if site is not None:
        return site in {"none", "same-origin"}
    return None if origin is None else True


def _host_of(url: str) -> str:
    """Return the host and port of a URL; empty if it has none, or is none."""
    try:
        return urlsplit(url).netloc
    except ValueError:
        return ""


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """A browser that is logged in."""

    token: str
    """What its cookie holds."""
    caller: Principal

    @property
    def form_token(self) -> str:
        """What its forms hold."""
        return hmac.new(self.token.encode(), _FORM, hashlib.sha256).hexdigest()

    def check_form(self, sent: str | None) -> None:
        """Check what a form holds.

        Raises:
            Forbidden: it is not a form of this session.
        """
        if sent is None or not hmac.compare_digest(sent.encode(), self.form_token.encode()):
            raise Forbidden("this form is not of your session; open the page again")


@dataclass(frozen=True, slots=True)
class Opening:
    """Who opens a session, before it is open."""

    caller: Principal
    ends_at: datetime | None
    """When the session has to end; None for any time."""


@dataclass(frozen=True, slots=True)
class BrowserSessions:
    """Opens, finds and ends the sessions of browsers."""

    tokens: ConsoleTokens
    authenticator: Authenticator
    throttle: Throttle = field(default_factory=Throttle)
    """Limits unknown keys, links and cookies by address."""

    async def link(self, caller: Principal, moment: datetime) -> str:
        """Return a token that opens one session with the rights of a caller's key, once."""
        token = secrets.token_urlsafe(32)
        await self.tokens.add(
            ConsoleToken(
                token_hash=hash_key(token),
                is_link=True,
                key_id=caller.key_id,
                created_at=moment,
                expires_at=moment + _LINK,
                session_ends_at=caller.expires_at,
            )
        )
        return token

    async def with_link(self, token: str, address: str, moment: datetime) -> Opening:
        """Use up a link; return who opens a session with it.

        Raises:
            Unauthenticated: the link was used, has expired, or its key has ended.
            Overloaded: so were too many others from this address.
        """
        ends_at: datetime | None = None

        async def look_up() -> Principal:
            nonlocal ends_at
            found = await self.tokens.use_link(hash_key(token), moment)
            if found is None:
                raise Unauthenticated(
                    "this link was used or has expired; `tinkercloud console` prints another one"
                )
            key_id, ends_at = found
            return await self.authenticator.holder_of(key_id)

        caller = await self.throttle.holder(address, look_up)
        return Opening(caller, ends_at)

    async def with_key(self, key: str, address: str) -> Opening:
        """Return who opens a session with an API key.

        Raises:
            Unauthenticated: the key is unknown, revoked or expired.
            Overloaded: so were too many others from this address.
        """
        found = await self.throttle.holder(address, lambda: self.authenticator.principal(key))
        return Opening(found, found.expires_at)

    async def open(self, opening: Opening, moment: datetime) -> BrowserSession:
        """Open a session."""
        ends = [opening.ends_at, opening.caller.expires_at, moment + _SESSION]
        token = secrets.token_urlsafe(32)
        await self.tokens.add(
            ConsoleToken(
                token_hash=hash_key(token),
                is_link=False,
                key_id=opening.caller.key_id,
                created_at=moment,
                expires_at=min(each for each in ends if each is not None),
            )
        )
        return BrowserSession(token, opening.caller)

    async def find(self, token: str | None, address: str, moment: datetime) -> BrowserSession:
        """Return the session of a cookie.

        Raises:
            Unauthenticated: there is none, or its key has ended.
            Overloaded: so were too many others from this address.
        """
        if not token:
            raise Unauthenticated(_LOGGED_OUT)

        async def look_up() -> Principal:
            key_id = await self.tokens.key_of_session(hash_key(token), moment)
            if key_id is None:
                raise Unauthenticated(_LOGGED_OUT)
            return await self.authenticator.holder_of(key_id)

        return BrowserSession(token, await self.throttle.holder(address, look_up))

    async def end(self, session: BrowserSession, *, everywhere: bool) -> None:
        """End a session, or all sessions of its owner."""
        if everywhere:
            await self.tokens.end_sessions(session.caller.owner)
        else:
            await self.tokens.end_session(hash_key(session.token))
