"""Sessions of browsers in the console: a browser has the rights of the API key that opened it.

A cookie holds 256 random bits, of which the catalog has the SHA-256. Forms hold a token that is
derived from them, so that no other site can send one.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from tinkercloud_api.access.auth import Authenticator, Principal, hash_key
from tinkercloud_api.catalog.access.console_tokens import ConsoleTokens
from tinkercloud_api.catalog.schema.tables import ConsoleToken
from tinkercloud_protocol.wire.errors import Forbidden, Unauthenticated

_LINK = timedelta(minutes=10)
_SESSION = timedelta(days=7)
_FORM = b"form"


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
class BrowserSessions:
    """Opens, finds and ends the sessions of browsers."""

    tokens: ConsoleTokens
    authenticator: Authenticator

    async def link(self, caller: Principal, moment: datetime) -> str:
        """Return a token that opens one session with the rights of a caller's key, once."""
        return await self._add(caller, moment, moment + _LINK, is_link=True)

    async def open_with_link(self, token: str, moment: datetime) -> BrowserSession:
        """Open a session with a link.

        Raises:
            Unauthenticated: the link was used, has expired, or its key has ended.
        """
        key_id = await self.tokens.use_link(hash_key(token), moment)
        if key_id is None:
            raise Unauthenticated(
                "this link was used or has expired; `tinkercloud console` prints another one"
            )
        return await self._open(await self.authenticator.holder_of(key_id), moment)

    async def open_with_key(self, key: str, moment: datetime) -> BrowserSession:
        """Open a session with an API key.

        Raises:
            Unauthenticated: the key is unknown, revoked or expired.
        """
        return await self._open(await self.authenticator.principal(key), moment)

    async def find(self, token: str | None, moment: datetime) -> BrowserSession:
        """Return the session of a cookie.

        Raises:
            Unauthenticated: there is none, or its key has ended.
        """
        key_id = None
        if token:
            key_id = await self.tokens.key_of_session(hash_key(token), moment)
        if token is None or key_id is None:
            raise Unauthenticated("log in to see this page")
        return BrowserSession(token, await self.authenticator.holder_of(key_id))

    async def end(self, session: BrowserSession, *, everywhere: bool) -> None:
        """End a session, or all sessions of its owner."""
        if everywhere:
            await self.tokens.end_sessions(session.caller.owner)
        else:
            await self.tokens.end_session(hash_key(session.token))

    async def _open(self, caller: Principal, moment: datetime) -> BrowserSession:
        ends_at = min(moment + _SESSION, caller.expires_at or moment + _SESSION)
        return BrowserSession(await self._add(caller, moment, ends_at, is_link=False), caller)

    async def _add(
        self, caller: Principal, moment: datetime, ends_at: datetime, *, is_link: bool
    ) -> str:
        token = secrets.token_urlsafe(32)
        row = ConsoleToken(
            token_hash=hash_key(token),
            is_link=is_link,
            key_id=caller.key_id,
            created_at=moment,
            expires_at=ends_at,
        )
        await self.tokens.add(row)
        return token
