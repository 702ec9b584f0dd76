"""retrieve_futures: which samples of a client are complete, in one poll for all of them.

The SDK (`tinker.lib.session_futures_poller`) polls once per client of a sampling session and
fetches the result of each sample that the answer names with retrieve_future. A client numbers its
samples from `CLIENT_NUMBERS` times its own number, so a request's seq_id says whose it is.

The client waits for samples without naming them. If the head that accepted them is gone, no other
head knows them, and the client would wait forever. A cursor therefore names the head that returned
it and the latest sample that this head had accepted: a poll that comes to another head, and those
after it, are answered with all numbers near that one, `_PAGE` in each answer. To report a sample
that is not complete is harmless: the client then polls retrieve_future for it, and learns there
that it has to send the sample again.

    bits of a cursor   62..48 epoch of the head, 47..28 latest sample / 1024, 27..0 event number

Between these answers the epoch is 0, and the event number counts the samples reported so far.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import orjson
from pydantic import Field

from tinkercloud_protocol.wire.ids import RequestId, SamplingSessionId
from tinkercloud_protocol.wire.json_model import Items, Name, WireModel

CLIENT_NUMBERS = 1_000_000_000
"""How many seq_ids of a sampling session each of its clients has."""
NEARBY_SAMPLES = 4096
"""Samples before and after the latest known one that are reported if their head is gone."""
MAX_RETRIEVED = 100_000
"""Maximum number of results that a poll reports as retrieved."""

_EPOCHS, _STEPS, _EVENTS = 1 << 15, 1 << 20, 1 << 28
_STEP = 1024
"""Resolution of the latest sample in a cursor."""
_PAGE = 512
"""Maximum number of samples in one answer to a poll that comes to another head."""


class SamplingSessionTarget(WireModel):
    """The samples of one client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Name
    cloned_sampler_id: Annotated[int, Field(ge=0, le=CLIENT_NUMBERS)] = 0
    """The client's number; 0 is the one that created the session."""


class RetrieveFuturesRequest(WireModel):
    """POST retrieve_futures: wait until samples of a client are complete."""

    target: SamplingSessionTarget
    prev_cursor: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """The cursor of the previous answer; 0 in the first request."""
    timeout: Annotated[float, Field(ge=0)] | None = None
    """Seconds to wait, at most a long poll; absent means a long poll."""
    retrieved_request_ids: Annotated[Items[Name], Field(max_length=MAX_RETRIEVED)] = Field(
        default_factory=list
    )
    """Samples whose results the client has received, so that they need not be kept."""


class JoinSamplingSessionRequest(WireModel):
    """POST join_sampling_session: get the number of another client of a sampling session."""

    sampling_session_id: Name


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in the completed samples of one client, as one head counts them."""

    epoch: int
    """Identifies the process of the head; 0 if the client has had no answer of this head yet."""
    latest: int
    """The latest sample that the head had accepted, counted from the client's first; in a cursor, a
    multiple of 1024."""
    event: int
    """Number of the last completion of any client that the answer covers."""

    @classmethod
    def parse(cls, value: int) -> "Cursor":
        """Read a cursor; any number is one."""
        rest, event = divmod(value, _EVENTS)
        epoch, step = divmod(rest, _STEPS)
        return cls(epoch % _EPOCHS, step * _STEP, event)

    def __int__(self) -> int:
        step = self.latest // _STEP % _STEPS
        return (self.epoch * _STEPS + step) * _EVENTS + self.event % _EVENTS


def epoch_of(random: int) -> int:
    """Return an epoch, which is never 0, from a random number."""
    return 1 + random % (_EPOCHS - 1)


def client_of(seq_id: int) -> int:
    """Return the number of the client that sent a sample."""
    return seq_id // CLIENT_NUMBERS


def nearby(target: SamplingSessionTarget, cursor: Cursor) -> tuple[list[str], Cursor]:
    """Return ids of a client's samples near the latest one that a head has accepted.

    Returns:
        At most `_PAGE` ids, from the latest sample upwards and then the earlier ones, and the
        cursor with which the client asks for the next ones; its event is 0 if these are the last.

    Raises:
        InvalidRequest: the target is not a sampling session id.
    """
    session_id = SamplingSessionId.parse(target.sampling_session_id)
    first = target.cloned_sampler_id * CLIENT_NUMBERS
    numbers = [
        *range(cursor.latest, cursor.latest + _STEP + NEARBY_SAMPLES),
        *range(max(cursor.latest - NEARBY_SAMPLES, 0), cursor.latest),
    ]
    start = cursor.event if cursor.epoch == 0 else 0
    end = start + _PAGE
    ids = [str(RequestId(session_id, first + number)) for number in numbers[start:end]]
    return ids, Cursor(0, cursor.latest, end if end < len(numbers) else 0)


def answer(completions: list[dict[str, object]], cursor: int) -> bytes:
    """Return the response to a poll."""
    return orjson.dumps({"completions": completions, "cursor": cursor})


def complete(request_id: str, *, size: int | None = None) -> dict[str, object]:
    """Return the entry of a sample that can be retrieved.

    Args:
        request_id: the sample.
        size: bytes of its result; None if it is not known.
    """
    entry: dict[str, object] = {"state": "finished", "request_id": request_id}
    return entry if size is None else entry | {"response_payload_uncompressed_size": size}


def failed(request_id: str) -> dict[str, object]:
    """Return the entry of a sample that failed; its error can be retrieved."""
    return {"state": "failed", "request_id": request_id}
