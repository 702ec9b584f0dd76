"""Authentication and authorization. No other module decides who a caller is or what it may see.

API keys consist of the prefix that the SDK requires and 256 random bits; the catalog stores their
SHA-256. Objects of a project are visible to its members, other objects to their owner, and all of
them to admins; for all others they do not exist.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol, TypeVar

from tinkercloud_api.access.access_tokens import PREFIX, AccessTokens
from tinkercloud_api.access.access_versions import AccessVersions
from tinkercloud_api.access.effects import Effect
from tinkercloud_api.access.roles import Role
from tinkercloud_api.catalog.access.visibility import EVERYTHING, Visibility
from tinkercloud_api.catalog.schema.tables import ApiKey, now
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.config.readable import moment
from tinkercloud_api.config.settings import KEY_PREFIX
from tinkercloud_protocol.wire.errors import Forbidden, InvalidRequest, NotFound, Unauthenticated

REMEMBERED_SECONDS = 10.0
"""How long keys are cached at most, and how long the last version of rights counts if the catalog
does not respond. Changes of keys, users and projects take effect at the next request, on all
servers."""
_MAX_CACHED = 10_000


_BY_RIGHTS = (Role.READ_ONLY, Role.USER, Role.ADMIN)


def least(role: Role, limit: Role | None) -> Role:
    """Return what a key with a role may do if its owner may do no more than a limit."""
    return role if limit is None else min(role, limit, key=_BY_RIGHTS.index)


class ProjectRole(StrEnum):
    """What a member may do with the objects of a project."""

    ADMIN = "admin"
    """Everything that members may, and manage the members."""
    MEMBER = "member"
    """Everything with all objects of the project, and create more of them."""
    VIEWER = "viewer"
    """Only read them; a checkpoint may also be loaded or sampled outside the project."""


class Owned(Protocol):
    """An object that belongs to a project, or without one to an owner."""

    @property
    def owner(self) -> str:
        """Name of the owner."""

    @property
    def project(self) -> str | None:
        """The project; None if it belongs to its owner alone."""


OwnedT = TypeVar("OwnedT", bound=Owned)


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated caller: the holder of an API key."""

    key_id: int
    key_name: str
    owner: str
    role: Role
    expires_at: datetime | None = None
    """When the key expires; None means never."""
    projects: Mapping[str, ProjectRole] = field(default_factory=dict)
    """The projects of the owner, with its role in each."""
    version: int = 0
    """The version of access rights that this reflects."""
    is_changing: bool = False
    """Whether the caller's request changes the objects that it names."""
    seen_projects: set[str] = field(default_factory=set)
    """Projects of the objects that the request has used so far."""
    named_objects: set[str] = field(default_factory=set)
    """Sessions, runs, samplers, checkpoints, programs, keys and members that the request has made,
    changed or trained so far."""
    restored: str = ""
    """The backup from which the catalog was restored, with its time; empty if it was not."""

    def requesting(self, method: str, path: str, effect: Effect) -> "Principal":
        """Return the same principal as the sender of one request, with this effect.

        Raises:
            Forbidden: the role does not allow the request.
        """
        if self.role is Role.READ_ONLY and effect.is_mutation:
            raise Forbidden(
                f"X-API-Key: key {self.key_name!r} or its owner is read-only and may not send"
                f" {method} {path[:200]}; use a key with the role user, or ask an admin to lift the"
                f" limit of its owner (tinkercloud users set-role {self.owner} none)"
            )
        if self.role is not Role.ADMIN and effect.needs_admin:
            raise Forbidden(
                f"X-API-Key: key {self.key_name!r} has the role {self.role}, and only admins may"
                f" send {method} {path[:200]}; use a key with the role admin"
            )
        is_changing = effect.is_mutation
        return replace(self, is_changing=is_changing, seen_projects=set(), named_objects=set())

    def may_see(self, owner: str) -> bool:
        """Whether objects without a project that belong to `owner` are visible."""
        return self.owner == owner or self.role is Role.ADMIN

    def relation_to(self, owner: str) -> str:
        """Return who changes an object, in words for its owner, such as `an administrator`."""
        if self.owner == owner:
            return "its owner"
        return "an administrator" if self.role is Role.ADMIN else "a member of its project"

    def require(self, found: OwnedT | None, what: str) -> OwnedT:
        """Return an object if this principal may use it as its request does.

        Args:
            found: the object; None if it does not exist at all.
            what: what was requested, such as `training run '...'`, for the error message.

        Raises:
            NotFound: the object does not exist for this principal.
            Forbidden: the request changes it, and its project allows the principal only to read.
        """
        found = self.require_read(found, what)
        if self.is_changing and not self._may_change(found.project):
            raise Forbidden(
                f"{what} belongs to project {found.project!r}, in which {self.owner!r} is a viewer"
                " and may change nothing; ask an admin of the project for the role member"
            )
        return found

    def require_read(self, found: OwnedT | None, what: str) -> OwnedT:
        """Return an object that a request only reads, even if it changes others.

        Raises:
            NotFound: the object does not exist for this principal.
        """
        if found is None or not self._may_read(found):
            message = f"{what} does not exist, or belongs to another owner"
            if self.restored:
                message += (
                    f". The catalog was restored from a {self.restored}, and does not have what was"
                    " made later: ask an administrator for the checkpoints that"
                    " `tinkercloud catalog rebuild` finds"
                )
            raise NotFound(message)
        if found.project is not None:
            self.seen_projects.add(found.project)
        return found

    def project_role(self, project_id: str) -> ProjectRole | None:
        """Return what this principal may do in a project that exists; None for nothing."""
        return ProjectRole.ADMIN if self.role is Role.ADMIN else self.projects.get(project_id)

    def _may_read(self, found: Owned) -> bool:
        if found.project is None:
            return self.may_see(found.owner)
        return self.project_role(found.project) is not None

    def may_change(self, found: Owned) -> bool:
        """Whether this principal may change an object that it may read."""
        return self.role is not Role.READ_ONLY and self._may_change(found.project)

    def works_on(self, found: Owned) -> bool:
        """Whether an object is this principal's own or its project's, not only an admin's view."""
        if found.project is None:
            return found.owner == self.owner
        return found.project in self.projects

    def _may_change(self, project_id: str | None) -> bool:
        return project_id is None or self.project_role(project_id) is not ProjectRole.VIEWER

    def visible(self, access_scope: str) -> Visibility:
        """Return which objects a list shows."""
        is_wide = access_scope == "accessible"
        if self.role is Role.ADMIN:
            return EVERYTHING if is_wide else Visibility(self.owner)
        within = frozenset(self.projects)
        return Visibility(self.owner, within, shared=within if is_wide else frozenset())

    def owner_filter(self, access_scope: str) -> str | None:
        """Return whose usage, programs and audit entries a list shows; None means all owners."""
        return None if access_scope == "accessible" and self.role is Role.ADMIN else self.owner


def new_key() -> str:
    """Return a new API key."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Return the hash of a key, as stored in the catalog."""
    return hashlib.sha256(key.encode()).hexdigest()


class Authenticator:
    """Looks up API keys and caches them briefly."""

    def __init__(
        self,
        catalog: Catalog,
        record_use: Callable[[int], None],
        tokens: AccessTokens,
        restored: str = "",
    ) -> None:
        """Create an authenticator.

        Args:
            catalog: contains the keys.
            record_use: called with the id of each accepted key.
            tokens: verifies the tokens that are accepted instead of keys.
            restored: see `Principal.restored`.
        """
        self._catalog = catalog
        self._versions = AccessVersions(
            catalog.access_version, REMEMBERED_SECONDS, catalog.access_version_at_once
        )
        self._record_use = record_use
        self._tokens = tokens
        self._restored = restored
        self._cached: dict[str, tuple[float, Principal]] = {}
        self._revoked: set[int] = set()
        """Keys revoked by this process: a concurrent lookup must not make one valid again."""

    def has_known(self, key: str) -> bool:
        """Whether a key was valid when it was last looked up."""
        return hash_key(key) in self._cached

    async def principal(self, key: str | None) -> Principal:
        """Return the holder of a key.

        Raises:
            Unauthenticated: the key is missing, unknown, revoked or expired.
        """
        if not key:
            raise Unauthenticated(
                "X-API-Key: the header is missing; set TINKER_API_KEY, or send the key as"
                " `X-API-Key: KEY` or `Authorization: Bearer KEY`"
            )
        principal = await self._holder(key)
        if principal.expires_at is not None and principal.expires_at <= now():
            raise Unauthenticated(
                f"X-API-Key: the key or token expired at {moment(principal.expires_at)}; ask an"
                " administrator for a new key"
            )
        self._record_use(principal.key_id)
        return principal

    async def holder_of(self, key_id: int) -> Principal:
        """Return the holder of the key with an id.

        Raises:
            Unauthenticated: the key was revoked or has expired, or its owner is disabled.
        """
        version = await self._versions.current()
        row = await self._catalog.key_numbered(key_id)
        if row is None or not row.is_valid(now()) or key_id in self._revoked:
            raise Unauthenticated("the API key of this session has ended; log in with another one")
        self._record_use(key_id)
        return await self._of_row(row, None, version)

    async def reader(self, caller: Principal, token: str | None) -> Principal:
        """Return whose access counts for reading a checkpoint.

        Args:
            caller: the caller.
            token: the request's `weights_access_token`: a key of another owner of this server;
                None if there is none.

        Raises:
            InvalidRequest: the token is not a valid key.
        """
        if token is None:
            return caller
        try:
            return await self.principal(token)
        except Unauthenticated:
            raise InvalidRequest(
                "weights_access_token: the key is unknown, expired or revoked; use an API key of an"
                " owner who may read the checkpoint"
            ) from None

    async def revoke(self, principal: Principal) -> None:
        """Revoke a principal's key; this process rejects it immediately."""
        await self.revoke_key(principal.key_id)

    async def revoke_key(self, key_id: int) -> None:
        """Revoke a key; this process rejects it immediately. This is idempotent."""
        await self._catalog.revoke_key(key_id)
        self._revoked.add(key_id)

    def token(self, principal: Principal) -> str:
        """Return an access token for a principal's key."""
        return self._tokens.issue(
            key_id=principal.key_id,
            owner=principal.owner,
            moment=now(),
            ends_at=principal.expires_at,
        )

    def trace_token(self, session_id: str) -> str:
        """Return a token for the URL of a session's trace, after the caller was checked."""
        return self._tokens.issue_trace(session_id, now())

    def session_of_trace(self, token: str) -> str | None:
        """Return the session of the URL of a trace; None if the URL is wrong or has expired."""
        return self._tokens.read_trace(token, now())

    async def _holder(self, key: str) -> Principal:
        version = await self._versions.current()
        moment, key_hash = time.monotonic(), hash_key(key)
        remembered = self._cached.get(key_hash)
        if remembered is not None and remembered[0] > moment and remembered[1].version == version:
            principal = remembered[1]
        else:
            found = await self._look_up(key, key_hash, version)
            if found is None:
                self._cached.pop(key_hash, None)
                raise Unauthenticated("the API key is unknown or has been revoked")
            principal = found
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            self._cached[key_hash] = (moment + REMEMBERED_SECONDS, principal)
        if principal.key_id in self._revoked:
            raise Unauthenticated("the API key is unknown or has been revoked")
        return principal

    async def _look_up(self, key: str, key_hash: str, version: int) -> Principal | None:
        """Return the holder of a key, or of the key that a token was issued for.

        Raises:
            Unauthenticated: the owner is disabled.
        """
        ends_at = None
        if key.startswith(PREFIX) and (token := self._tokens.read(key)) is not None:
            row = await self._catalog.key_numbered(token.key_id)
            ends_at = datetime.fromtimestamp(token.expires_at, UTC)
        else:
            row = await self._catalog.key(key_hash)
        if row is None:
            return None
        try:
            return await self._of_row(row, ends_at, version)
        except Unauthenticated:
            self._cached.pop(key_hash, None)
            raise

    async def _of_row(self, row: ApiKey, ends_at: datetime | None, version: int) -> Principal:
        """Return the holder of a key.

        Args:
            row: the key.
            ends_at: when what was sent instead of it expires; None if that is the key itself.
            version: the version of access rights.

        Raises:
            Unauthenticated: the owner is disabled.
        """
        user = await self._catalog.user(row.owner)
        if user is not None and user.disabled_at is not None:
            raise Unauthenticated(
                f"X-API-Key: the owner {row.owner!r} is disabled; ask an administrator to enable it"
            )
        limit = Role(user.role) if user is not None and user.role is not None else None
        memberships = await self._catalog.memberships(row.owner)
        ends = [moment for moment in (ends_at, row.expires_at) if moment is not None]
        return Principal(
            row.id,
            row.name,
            row.owner,
            least(Role(row.role), limit),
            min(ends, default=None),
            {project: ProjectRole(role) for project, role in memberships.items()},
            version,
            restored=self._restored,
        )
