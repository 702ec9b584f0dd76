"""Which sessions wait for others that compete with them for devices; no I/O.

`decide.tenancy.device_claims` says what sessions compete for, and in which order they start.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.tenancy.device_claims import (
    Claim,
    claim_of,
    compete,
    has_nodes,
    in_start_order,
    may_have_pods,
    waiting_message,
    waits_for_nodes,
)
from tinkercloud_operator.decide.tenancy.quota_claims import Offering
from tinkercloud_operator.spec.observed import ChildKey


@dataclass(slots=True)
class StartOrder:
    """The sessions of a namespace that wait for nodes. Belongs to one event loop."""

    _waiting: dict[str, Manifest] = field(default_factory=dict)
    """By name."""
    _holding: dict[str, Manifest] = field(default_factory=dict)
    """Sessions that have a RayCluster, by name."""
    _admitted: set[str] = field(default_factory=set)
    """Sessions that may start; their RayClusters may not be visible yet."""
    _claims: dict[str, tuple[Manifest, Manifest | None, Claim | None]] = field(default_factory=dict)
    """By session: its spec, its BaseModel, and the claim that follows from them."""

    def note(
        self, name: str, session: Manifest | None, children: Mapping[ChildKey, Manifest]
    ) -> bool:
        """Record a session and its children; return whether it may be another session's turn.

        That is so if this one has just stopped waiting, or holds no devices any more.
        """
        if session is None:
            self._claims.pop(name, None)
        has_cluster = session is not None and ChildKey("RayCluster", name) in children
        was_holding = self._holding.pop(name, None) is not None
        if session is not None and has_cluster:
            self._holding[name] = session
        is_freed = was_holding and not has_cluster
        if session is not None and waits_for_nodes(session) and not has_nodes(session, children):
            self._waiting[name] = session
            if has_cluster:
                self._admitted.add(name)
            return is_freed
        self._admitted.discard(name)
        return self._waiting.pop(name, None) is not None or is_freed

    def admit(self, session: Manifest, offering: Offering) -> None:
        """Let a session start if no other one that competes is before it.

        It keeps its turn until it has nodes, even if older sessions are created meanwhile.

        Args:
            session: the session.
            offering: returns the active BaseModel of a model name, if there is one.
        """
        is_ordered = may_have_pods(session) and self._claim(session, offering) is not None
        if is_ordered and self.waiting_message(session, offering) is None:
            self._admitted.add(session["metadata"]["name"])

    def waiting_message(self, session: Manifest, offering: Offering) -> str | None:
        """Return why a session waits for others that compete with it; None if it may start.

        Args:
            session: the session.
            offering: returns the active BaseModel of a model name, if there is one.
        """
        name = session["metadata"]["name"]
        own = self._claim(session, offering)
        if own is None or name in self._admitted:
            return None
        # Many sessions have few BaseModels, and finding one takes longer than the rest.
        offering = cache(offering)
        ahead = []
        for other in self._in_order({**self._waiting, name: session}.values(), offering):
            if other["metadata"]["name"] == name:
                break
            found = self._claim(other, offering)
            if found is not None and compete(own, found):
                ahead.append(other)
        return waiting_message(session, ahead) if ahead else None

    def next(self, offering: Offering) -> set[str]:
        """Return, for each BaseModel, the session that is next to start."""
        first: dict[str, str] = {}
        for session in self._in_order(self._waiting.values(), cache(offering)):
            if session["metadata"]["name"] not in self._admitted:
                model = session["spec"].get("baseModel", "")
                first.setdefault(model, session["metadata"]["name"])
        return set(first.values())

    def _in_order(self, waiting: Iterable[Manifest], offering: Offering) -> Iterator[Manifest]:
        """Yield the sessions that compete for devices, in the order in which they may start."""
        return in_start_order(
            self._with_claims(waiting, offering),
            self._with_claims(self._holding.values(), offering),
            self._admitted,
        )

    def _with_claims(self, sessions: Iterable[Manifest], offering: Offering) -> list[Manifest]:
        return [each for each in sessions if self._claim(each, offering) is not None]

    def _claim(self, session: Manifest, offering: Offering) -> Claim | None:
        name, spec = session["metadata"]["name"], session["spec"]
        offer = offering(spec.get("baseModel", ""))
        known = self._claims.get(name)
        if known is None or known[0] is not spec or known[1] is not offer:
            known = (spec, offer, claim_of(spec, offer))
            self._claims[name] = known
        return known[2]
