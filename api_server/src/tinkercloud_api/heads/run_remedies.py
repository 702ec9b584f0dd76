"""What to do about runs that are lost or wait."""

from collections.abc import Mapping

from tinkercloud_api.heads.run_states import Whereabouts

_REMEDIES: Mapping[str, str] = {
    "ending": "wait until its last checkpoint is saved, then continue it from there: tinkercloud"
    " runs attach {run}",
    "lost": "continue it from a checkpoint: tinkercloud runs attach {run}",
    "unknown": "look at the checkpoint store and the disk of the server, which do not respond",
    "paused_capacity": "end a run that nobody needs (tinkercloud runs stop), or raise the limit or"
    " the memory that the reason names",
    "paused_rate_limit": "wait, read the results that are ready, or ask an admin to raise the limit"
    " that the reason names",
}
_NEVER_RAN = "create the run again: it has no state to continue from"


def remedy_of_state(place: Whereabouts, run_id: str) -> str | None:
    """Return what to do about the state of a run; None if there is nothing to do."""
    if not place.has_run:
        return _NEVER_RAN
    return _filled(place.state, run_id)


def remedy_of_wait(place: Whereabouts, run_id: str) -> str | None:
    """Return what to do about what the next request of a run waits for; None for nothing."""
    return _filled(place.queue_state, run_id)


def remedy_of(place: Whereabouts, run_id: str) -> str | None:
    """Return what to do about a run; None if there is nothing to do."""
    return remedy_of_state(place, run_id) or remedy_of_wait(place, run_id)


def _filled(state: str, run_id: str) -> str | None:
    found = _REMEDIES.get(state)
    return None if found is None else found.format(run=run_id)
