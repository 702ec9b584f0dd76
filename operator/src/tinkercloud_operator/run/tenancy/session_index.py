"""An index of sessions by BaseModel and owner, so that lookups need not scan all sessions."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from tinkercloud_crds.quota_fields import Age
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.read.session_facts import age, is_live

Group = tuple[str, str | None]
"""BaseModel and owner."""


@dataclass(slots=True)
class SessionIndex:
    """Sessions by BaseModel and owner. Belongs to one event loop."""

    _of_model: dict[str, dict[str, Manifest]] = field(default_factory=dict)
    """By BaseModel, then by name."""
    _live: dict[Group, list[Age]] = field(default_factory=dict)
    """Sessions that have not finished, oldest first."""
    _names: dict[Group, set[str]] = field(default_factory=dict)

    def put(self, session: Manifest) -> None:
        """Add a session that is not in the index."""
        model, group, name = _model(session), _group(session), session["metadata"]["name"]
        self._of_model.setdefault(model, {})[name] = session
        self._names.setdefault(group, set()).add(name)
        if is_live(session):
            insort(self._live.setdefault(group, []), age(session))

    def remove(self, session: Manifest) -> None:
        """Remove a session, given as it was added."""
        model, group, name = _model(session), _group(session), session["metadata"]["name"]
        del self._of_model[model][name]
        if not self._of_model[model]:
            del self._of_model[model]
        self._names[group].discard(name)
        if not self._names[group]:
            del self._names[group]
        if is_live(session):
            del self._live[group][self.older(session)]
            if not self._live[group]:
                del self._live[group]

    def of_model(self, model: str) -> Iterable[Manifest]:
        """Return the sessions of a BaseModel."""
        return list(self._of_model.get(model, {}).values())

    def siblings(self, session: Manifest) -> frozenset[str]:
        """Return the names of all sessions with the same owner and BaseModel."""
        return frozenset(self._names.get(_group(session), ()))

    def older(self, session: Manifest) -> int:
        """Return how many live sessions of the same owner and BaseModel are older."""
        return bisect_left(self._live.get(_group(session), []), age(session))


def _model(session: Manifest) -> str:
    return str(session["spec"].get("baseModel", ""))


def _group(session: Manifest) -> Group:
    return _model(session), session["spec"].get("owner")
