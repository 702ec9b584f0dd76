"""The states of a model in a head, and the events that change them. Pure.

docs/understand/suspend-and-resume.md has the same tables, and a test compares them.
"""

from collections.abc import Mapping
from enum import StrEnum


class ModelPlace(StrEnum):
    """The place of a model, as its head knows it."""

    NOWHERE = "nowhere"
    """The head has nothing of it, except possibly a journal on its disk."""
    MEMORY = "memory"
    STORE = "store"
    """The checkpoint store, for this head to resume."""
    ELSEWHERE = "elsewhere"
    """Another head may have it."""


class ModelState(StrEnum):
    """The state of one model in one head. The value is its name in the documentation."""

    ABSENT = "Absent"
    NEW = "New"
    LIVE = "Live"
    SUSPENDING = "Suspending"
    FREEING = "Freeing"
    SUSPENDED = "Suspended"
    RESUMING = "Resuming"
    RETURNING = "Returning"
    RECOVERING = "Recovering"
    AWAITED = "Awaited"
    MOVING = "Moving"
    LEAVING = "Leaving"
    MOVED = "Moved"
    REFUSED = "Refused"
    DROPPING = "Dropping"
    TAKEN_OVER = "Taken over"
    WRITTEN = "Written"
    DELETING = "Deleting"
    ENDING = "Ending"

    @property
    def place(self) -> ModelPlace:
        """Where the head has the model."""
        return _PLACES.get(self, ModelPlace.NOWHERE)

    @property
    def is_restoring(self) -> bool:
        """Whether a task restores the model into memory."""
        return self in _RESTORING

    @property
    def is_written(self) -> bool:
        """Whether a task writes the model to the store, or frees its memory after that."""
        return self in WRITING

    @property
    def waits(self) -> bool:
        """Whether a request for the model waits until it is in memory, or has been moved."""
        return self.is_written or self.place is ModelPlace.STORE

    @property
    def is_moved(self) -> bool:
        """Whether a request for the model is refused, because another head continues it."""
        return self.place is ModelPlace.ELSEWHERE and not self.waits

    @property
    def is_being_deleted(self) -> bool:
        """Whether the model is deleted, and a task removes what is left of it."""
        return self in {ModelState.DELETING, ModelState.ENDING}

    @property
    def may_be_kept(self) -> bool:
        """Whether a journal on the disk may be all that the head has of the model."""
        return self in {ModelState.ABSENT, ModelState.RECOVERING, ModelState.AWAITED}


_PLACES: Mapping[ModelState, ModelPlace] = {
    ModelState.NEW: ModelPlace.MEMORY,
    ModelState.LIVE: ModelPlace.MEMORY,
    ModelState.SUSPENDING: ModelPlace.MEMORY,
    ModelState.MOVING: ModelPlace.MEMORY,
    ModelState.WRITTEN: ModelPlace.MEMORY,
    ModelState.FREEING: ModelPlace.STORE,
    ModelState.SUSPENDED: ModelPlace.STORE,
    ModelState.RESUMING: ModelPlace.STORE,
    ModelState.RETURNING: ModelPlace.STORE,
    ModelState.LEAVING: ModelPlace.ELSEWHERE,
    ModelState.MOVED: ModelPlace.ELSEWHERE,
    ModelState.REFUSED: ModelPlace.ELSEWHERE,
    ModelState.DROPPING: ModelPlace.ELSEWHERE,
    ModelState.TAKEN_OVER: ModelPlace.ELSEWHERE,
}
_RESTORING = frozenset(
    {ModelState.RESUMING, ModelState.RETURNING, ModelState.RECOVERING, ModelState.AWAITED}
)
WRITING = frozenset(
    {ModelState.SUSPENDING, ModelState.FREEING, ModelState.MOVING, ModelState.LEAVING}
)


class ModelEvent(StrEnum):
    """An event in the life of a model. The value is its description in the documentation."""

    CREATE = "a client creates it"
    STARTED = "its creation is queued"
    NOT_STARTED = "its journal can't be started"
    SUSPEND = "it is suspended"
    MOVE = "it is moved"
    REFUSE = "it is moved before it has arrived"
    STORED = "its state is in the store"
    NOT_STORED = "its state can't be written"
    FREED = "its memory is free"
    TAKE_OVER = "another head takes it over"
    REQUEST = "a request needs it"
    ACCEPT = "the head accepts it, just before it leaves the store"
    RECOVER = "it comes from another head"
    KEEP = "the head saves or moves what its disk has"
    RESTORED = "it is in memory again"
    NOT_RESTORED = "it can't be restored"
    TAKE_BACK = "no other head takes it"
    ARRIVE = "another head gives it back"
    FORGET = "too many have been moved since"
    WRITE = "the stopping head has written it"
    DELETE = "it is deleted"
    REMOVED = "nothing is left of it"
    REMOVED_EARLY = "it is removed while its journal still starts"


_Key = tuple[ModelState, ModelEvent]
_S, _E = ModelState, ModelEvent

TRANSITIONS: Mapping[_Key, ModelState] = {
    (_S.ABSENT, _E.CREATE): _S.NEW,
    (_S.NEW, _E.STARTED): _S.LIVE,
    (_S.NEW, _E.NOT_STARTED): _S.ABSENT,
    (_S.LIVE, _E.SUSPEND): _S.SUSPENDING,
    (_S.SUSPENDING, _E.STORED): _S.FREEING,
    (_S.SUSPENDING, _E.NOT_STORED): _S.LIVE,
    (_S.FREEING, _E.FREED): _S.SUSPENDED,
    (_S.SUSPENDED, _E.REQUEST): _S.RESUMING,
    (_S.RESUMING, _E.REQUEST): _S.RESUMING,
    (_S.RETURNING, _E.REQUEST): _S.RETURNING,
    (_S.RESUMING, _E.ACCEPT): _S.RETURNING,
    (_S.RESUMING, _E.NOT_RESTORED): _S.SUSPENDED,
    (_S.RETURNING, _E.NOT_RESTORED): _S.SUSPENDED,
    (_S.RETURNING, _E.RESTORED): _S.LIVE,
    (_S.ABSENT, _E.RECOVER): _S.RECOVERING,
    (_S.RECOVERING, _E.RECOVER): _S.RECOVERING,
    (_S.RECOVERING, _E.RESTORED): _S.LIVE,
    (_S.RECOVERING, _E.NOT_RESTORED): _S.ABSENT,
    (_S.ABSENT, _E.KEEP): _S.AWAITED,
    (_S.RECOVERING, _E.KEEP): _S.AWAITED,
    (_S.AWAITED, _E.KEEP): _S.AWAITED,
    (_S.AWAITED, _E.RECOVER): _S.AWAITED,
    (_S.AWAITED, _E.RESTORED): _S.LIVE,
    (_S.AWAITED, _E.NOT_RESTORED): _S.ABSENT,
    (_S.LIVE, _E.MOVE): _S.MOVING,
    (_S.MOVING, _E.STORED): _S.LEAVING,
    (_S.MOVING, _E.NOT_STORED): _S.LIVE,
    (_S.LEAVING, _E.FREED): _S.MOVED,
    (_S.SUSPENDED, _E.MOVE): _S.MOVED,
    (_S.ABSENT, _E.REFUSE): _S.REFUSED,
    (_S.MOVED, _E.TAKE_BACK): _S.SUSPENDED,
    (_S.REFUSED, _E.TAKE_BACK): _S.ABSENT,
    (_S.MOVED, _E.ARRIVE): _S.ABSENT,
    (_S.REFUSED, _E.ARRIVE): _S.ABSENT,
    (_S.TAKEN_OVER, _E.ARRIVE): _S.ABSENT,
    (_S.MOVED, _E.FORGET): _S.ABSENT,
    (_S.REFUSED, _E.FORGET): _S.ABSENT,
    (_S.TAKEN_OVER, _E.FORGET): _S.ABSENT,
    (_S.NEW, _E.TAKE_OVER): _S.DROPPING,
    (_S.LIVE, _E.TAKE_OVER): _S.DROPPING,
    (_S.SUSPENDING, _E.TAKE_OVER): _S.DROPPING,
    (_S.MOVING, _E.TAKE_OVER): _S.DROPPING,
    (_S.WRITTEN, _E.TAKE_OVER): _S.DROPPING,
    (_S.DROPPING, _E.FREED): _S.TAKEN_OVER,
    (_S.LIVE, _E.WRITE): _S.WRITTEN,
    **{(each, _E.DELETE): _S.DELETING for each in _S if each not in {_S.DELETING, _S.ENDING}},
    # The tasks that a deletion waits for end like this.
    (_S.DELETING, _E.FREED): _S.DELETING,
    (_S.DELETING, _E.NOT_RESTORED): _S.DELETING,
    (_S.DELETING, _E.REMOVED): _S.ABSENT,
    (_S.DELETING, _E.REMOVED_EARLY): _S.ENDING,
    (_S.ENDING, _E.REMOVED): _S.ABSENT,
}
"""The next state, by state and event. All other pairs are impossible."""


class ImpossibleTransition(Exception):
    """An event that can't happen in a state: a fault in the head."""

    def __init__(self, state: ModelState, event: ModelEvent) -> None:
        super().__init__(f"a model in the state {state} can't change because {event}")


def after(state: ModelState, event: ModelEvent) -> ModelState:
    """Return the state that follows an event.

    Raises:
        ImpossibleTransition: the event can't happen in this state.
    """
    found = TRANSITIONS.get((state, event))
    if found is None:
        raise ImpossibleTransition(state, event)
    return found
