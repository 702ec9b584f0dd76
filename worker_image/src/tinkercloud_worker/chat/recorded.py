"""Recorded sessions: the exact tokens and logprobs of an agent's turns, as training data.

They are kept in the head's memory. A session that is lost with its head, or has expired, is unknown
from then on: turns are never missing from a session without notice. One owner's sessions have a
bounded size; a full one rejects further turns.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinkercloud_protocol.heads.head_messages import RecordedSession
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound
from tinkercloud_protocol.wire.recorded_paths import recorded_name

MAX_OWNER_TOKENS = 1 << 22
"""Tokens that one owner's sessions may hold; each takes some tens of bytes."""
MAX_OWNER_SESSIONS = 1 << 12
IDLE_SECONDS = 24 * 3600.0
"""Sessions expire this long after their last use."""
_FACTOR, _BITS = 0x9E3779B97F4A7C15, (1 << 61) - 1
"""How digests of tokens are computed, which only save comparisons."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled answer: P prompt tokens, then L sampled tokens with their logprobs."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]

    @property
    def num_tokens(self) -> int:
        """P + L."""
        return len(self.prompt) + len(self.tokens)


@dataclass(slots=True)
class _Session:
    owner: str
    model: str
    created: int
    """Seconds since 1970-01-01 in UTC."""
    used_at: float
    """In seconds of the sessions' clock."""
    turns: list[Turn] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(turn.num_tokens for turn in self.turns)


class RecordedSessions:
    """The recorded sessions of a head. Belongs to one event loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._sessions: dict[str, _Session] = {}

    def create(self, sampler_id: str, owner: str, model: str) -> str:
        """Create a session; return its name, which starts with the sampling session.

        Raises:
            InvalidRequest: the owner has too many.
        """
        self._expire()
        count = sum(each.owner == owner for each in self._sessions.values())
        if count >= MAX_OWNER_SESSIONS:
            raise InvalidRequest(
                f"{count} recorded sessions exist already, the maximum for one owner; delete those"
                " whose turns you have read"
            )
        name = recorded_name(sampler_id, uuid.uuid4().hex)
        self._sessions[name] = _Session(owner, model, int(time.time()), self._now())
        return name

    def check_room(self, name: str, model: str) -> None:
        """Check that a turn of a model can be added.

        Raises:
            NotFound: the session is unknown.
            InvalidRequest: it belongs to another model, or its owner's sessions are full.
        """
        session = self._get(name)
        if model != session.model:
            raise InvalidRequest(
                f"model: this recorded session is of {session.model[:256]!r}, got {model[:256]!r}"
            )
        mine = [each for each in self._sessions.values() if each.owner == session.owner]
        held = sum(each.num_tokens for each in mine)
        if held >= MAX_OWNER_TOKENS:
            raise InvalidRequest(
                f"the recorded sessions of this owner hold {held} tokens; the maximum is"
                f" {MAX_OWNER_TOKENS}. Read their datums, then delete them"
            )

    def add(self, name: str, turn: Turn) -> None:
        """Add a turn.

        Raises:
            NotFound: the session is unknown.
        """
        self._get(name).turns.append(turn)

    def turns(self, name: str) -> list[Turn]:
        """Return the turns of a session in the order in which they ended.

        Raises:
            NotFound: the session is unknown.
        """
        return list(self._get(name).turns)

    def of_owner(self, owner: str) -> list[RecordedSession]:
        """Return the sessions of an owner, the oldest first."""
        self._expire()
        return [self._shown(name) for name, each in self._sessions.items() if each.owner == owner]

    def session(self, name: str) -> RecordedSession:
        """Return one session.

        Raises:
            NotFound: the session is unknown.
        """
        self._get(name)
        return self._shown(name)

    def _shown(self, name: str) -> RecordedSession:
        session = self._sessions[name]
        left = session.used_at + IDLE_SECONDS - self._now()
        return RecordedSession(
            id=name,
            model=session.model,
            num_turns=len(session.turns),
            num_tokens=session.num_tokens,
            created=session.created,
            expires=int(time.time() + left),
        )

    def delete(self, name: str) -> None:
        """Delete a session, which may be unknown."""
        self._sessions.pop(name, None)

    def _get(self, name: str) -> _Session:
        self._expire()
        session = self._sessions.get(name)
        if session is None:
            raise NotFound(
                f"recorded session {name[:256]!r} is unknown: it was deleted, has expired, or was"
                " lost with its session head; create a new one and repeat the episode"
            )
        session.used_at = self._now()
        return session

    def _expire(self) -> None:
        oldest = self._now() - IDLE_SECONDS
        for name in [name for name, each in self._sessions.items() if each.used_at < oldest]:
            del self._sessions[name]


@dataclass(slots=True)
class _Sequence:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    digest: int = 0
    """Digest of its tokens."""

    def is_prefix_of(self, prompt: Sequence[int]) -> bool:
        return list(prompt[: len(self.tokens)]) == self.tokens

    def extend(self, index: int, turn: Turn) -> None:
        given = list(turn.prompt[len(self.tokens) :])
        self.tokens += [*given, *turn.tokens]
        self.logprobs += [*[0.0] * len(given), *turn.logprobs]
        self.mask += [*[0.0] * len(given), *[1.0] * len(turn.tokens)]
        self.turns.append(index)
        for token in (*given, *turn.tokens):
            self.digest = (self.digest * _FACTOR + token) & _BITS


class _Sequences:
    """The sequences so far, found by their tokens in time proportional to a prompt."""

    def __init__(self) -> None:
        self.all: list[_Sequence] = []
        self._by_digest: dict[int, list[int]] = {}

    def add(self, index: int, turn: Turn) -> None:
        """Add a turn to the latest sequence that its prompt begins with, or to a new one."""
        place = self._continued(turn.prompt)
        if place is None:
            place = len(self.all)
            self.all.append(_Sequence())
        else:
            self._by_digest[self.all[place].digest].remove(place)
        self.all[place].extend(index, turn)
        self._by_digest.setdefault(self.all[place].digest, []).append(place)

    def _continued(self, prompt: Sequence[int]) -> int | None:
        found, digest = set(), 0
        for token in prompt:
            digest = (digest * _FACTOR + token) & _BITS
            if digest in self._by_digest:
                found.update(self._by_digest[digest])
        fitting = (at for at in sorted(found, reverse=True) if self.all[at].is_prefix_of(prompt))
        return next(fitting, None)


def datums(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return turns as data for a policy gradient.

    A turn whose prompt begins with all tokens of an earlier one, prompt and answer, continues its
    datum. Every sampled token is in exactly one datum with mask 1.

    Returns:
        For each datum of N + 1 tokens: `turns`, the indices of its turns; `model_input`, N tokens;
        `loss_fn_inputs`, tensors of shape [N]: `target_tokens` (int64), `logprobs` and `mask`
        (float32; 1 where the target was sampled, elsewhere both are 0).
    """
    sequences = _Sequences()
    for index, turn in enumerate(turns):
        sequences.add(index, turn)
    return [_datum(sequence) for sequence in sequences.all]


def _datum(sequence: _Sequence) -> dict[str, Any]:
    chunk = {"type": "encoded_text", "tokens": sequence.tokens[:-1]}
    return {
        "turns": sequence.turns,
        "model_input": {"chunks": [chunk]},
        "loss_fn_inputs": {
            "target_tokens": _tensor(sequence.tokens[1:], "int64"),
            "logprobs": _tensor(sequence.logprobs[1:], "float32"),
            "mask": _tensor(sequence.mask[1:], "float32"),
        },
    }


def _tensor(values: Sequence[float], dtype: str) -> dict[str, Any]:
    return {"data": values, "dtype": dtype, "shape": [len(values)]}
