"""The suspended state of a run apart from its weights: requests, results and samplers.

`head.json` is `HeadState`; it refers to byte ranges of `bodies.bin`. `protocol.checkpoints`
describes the layout of the whole state.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tinkercloud_protocol.heads.checkpoint_manifest import BODIES, HEAD_STATE, SuspendedManifest
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import describe

Hex = Annotated[str, Field(pattern=r"[0-9a-f]*")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class ByteSpan(_Part):
    """A byte range of `bodies.bin`."""

    start: int
    size: int


class StoredRequest(_Part):
    """A request that has its place in the order and has not started."""

    seq_id: int
    path: str
    body: ByteSpan
    role: Literal["gradient", "step", "save", "load", "other"]
    digest: Hex
    size: int
    knows_of: str | None
    """The failed request whose failure the client had read when it sent this one."""


class StoredResult(_Part):
    """A result that a client may still poll for."""

    request_id: str
    digest: Hex
    body: ByteSpan
    content_type: str
    is_read: bool


class StoredSampler(_Part):
    """Weights that were never saved under a name, and their sampling sessions."""

    sessions: list[str]
    is_inflight: bool
    lora: LoraConfig | None
    file: str
    step: int | None = None
    """Number of optimizer steps that they have taken; None if it is not known, as in states of
    earlier releases."""


class EvictedSampler(_Part):
    """A sampling session whose unnamed weights are in a file of their own."""

    session: str
    lora: LoraConfig
    key: str
    """The file in the checkpoint store."""
    size_bytes: int
    sha256: Hex


class HeadState(_Part):
    """The state of one run, without its weights."""

    refused: str | None
    """Why the model could not be created; it has no weights then."""
    next_seq_id: int
    failure: tuple[str, str] | None
    """The failed gradient request of the current step: its id and message."""
    gradient_lost: str | None = None
    """How the gradient of that step was lost; None if a request has reported it."""
    waiting: list[StoredRequest]
    results: list[StoredResult]
    samples: list[ByteSpan]
    """Unfinished sampling requests."""
    samplers: list[StoredSampler]
    evicted: list[EvictedSampler]
    keys: Mapping[str, int]
    """Numbers of the requests that were sent without one, by idempotency key."""
    unsaved_changes: int
    """Number of changes that are in no training checkpoint."""
    latest_checkpoint: str | None
    """Path of the latest training checkpoint, automatic ones included."""
    curve: ByteSpan | None = None
    """What its steps have reported; None in states of earlier releases."""


class Bodies:
    """Collects byte strings in one file."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, content: bytes) -> ByteSpan:
        """Append bytes; return their range."""
        span = ByteSpan(start=self._size, size=len(content))
        self._parts.append(content)
        self._size += len(content)
        return span

    def encode(self) -> bytes:
        """Return the file."""
        return b"".join(self._parts)


class SuspendedHead:
    """A decoded `HeadState` with its bodies."""

    def __init__(
        self, manifest: SuspendedManifest, files: Mapping[str, bytes | memoryview]
    ) -> None:
        """Decode the files.

        Raises:
            InvalidRequest: a file is damaged.
        """
        self._bodies = memoryview(files[BODIES])
        try:
            self.state = HeadState.model_validate_json(bytes(files[HEAD_STATE]))
        except ValidationError as error:
            raise InvalidRequest(
                f"{manifest}: {HEAD_STATE} is damaged ({describe(error)})"
            ) from None

    def body(self, span: ByteSpan) -> bytes:
        """Return the bytes of a span."""
        return bytes(self._bodies[span.start : span.start + span.size])
