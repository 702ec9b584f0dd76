"""Requests to the heads of pools to give models away, and to take them back."""

from collections.abc import Iterable

from tinkercloud_crds import labels
from tinkercloud_kube.objects import Manifest
from tinkercloud_operator.decide.pool.pool_model import PoolFacts
from tinkercloud_operator.decide.session.actions import GiveAway, TakeBack
from tinkercloud_operator.run.cluster.save_requests import HeadSaver
from tinkercloud_operator.spec.observed import FailedSave

_GIVE_AWAY, _TAKE_BACK = "give-away", "take-back"
"""Kinds of the requests to give a model away, and to take it back."""
_SECONDS = 600.0
"""Time limit of a request: the running request finishes, and the model is written."""


class MoveRequests:
    """What heads were asked in moves, and what they have done. Belongs to one event loop.

    Args:
        head_saver: sends the requests.
    """

    def __init__(self, head_saver: HeadSaver) -> None:
        self._head_saver = head_saver

    def given_away(self, sessions: Iterable[Manifest]) -> set[tuple[str, str]]:
        """Return those of the sessions whose models heads gave away, with the incarnation."""
        return self._completed(_GIVE_AWAY, sessions)

    def taken_back(self, sessions: Iterable[Manifest]) -> set[tuple[str, str]]:
        """Return those of the sessions whose models heads took back, with the incarnation."""
        return self._completed(_TAKE_BACK, sessions)

    def _completed(self, wanted: str, sessions: Iterable[Manifest]) -> set[tuple[str, str]]:
        return {
            (name, incarnation)
            for name in _names(sessions)
            for kind, incarnation in self._head_saver.completed(name)
            if kind == wanted
        }

    def failed(self, sessions: Iterable[Manifest]) -> dict[tuple[str, str], FailedSave]:
        """Return the failures to give models away, by session and the head's incarnation."""
        return {
            (name, incarnation): failure
            for name in _names(sessions)
            for (kind, incarnation), failure in self._head_saver.failed(name).items()
            if kind == _GIVE_AWAY
        }

    def forget_arrived(self, sessions: Iterable[Manifest]) -> None:
        """Forget what heads have given away, or taken back, in moves that have ended."""
        for session in sessions:
            if labels.MOVING_TO not in session["metadata"].get("annotations", {}):
                self._forget(session["metadata"]["name"])

    def _forget(self, session: str) -> None:
        self._head_saver.discard(session, _GIVE_AWAY)
        self._head_saver.discard(session, _TAKE_BACK)

    def ask(
        self, facts: PoolFacts, kind: type[GiveAway | TakeBack], sessions: Iterable[str]
    ) -> None:
        """Ask heads to give models away, or to take them back; one request for a model at a time.

        Otherwise a head could give a model away after it was taken back.
        """
        clusters = {cluster.name: cluster for cluster in facts.clusters}
        known = {session.name: session for session in facts.sessions}
        for name in sessions:
            session = known[name]
            source = clusters[session.cluster or ""]
            pending = {incarnation for _, incarnation in self._head_saver.pending(name)}
            if source.incarnation in pending:
                continue
            if session.model_id and source.is_ready and source.endpoint and source.incarnation:
                # What the head did before will not be true any more.
                self._forget(name)
                request = kind(
                    source.name, source.endpoint, source.incarnation, session.model_id, _SECONDS
                )
                self._head_saver.submit(name, request)


def _names(sessions: Iterable[Manifest]) -> Iterable[str]:
    return (session["metadata"]["name"] for session in sessions)
