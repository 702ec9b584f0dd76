"""Identifiers: how they are built and parsed, and where each part is routed.

Every id contains its parents, so that any replica knows the location of a result without a lookup:

    session            3f0c9a52-...                    one per `ServiceClient`
    model              <session>:train:<index>         one per `TrainingClient`; also the run's id
    sampling session   <session>:sample:<index>        one per `SamplingClient`
    request            <model or sampling session>:<seq_id>
    sequence           <request>:<sample index>

The SDK defines the format of model ids, because it builds them on the client for create-from-state;
the other formats are ours and opaque to the client.
"""

import re
import uuid
from dataclasses import dataclass

from tinkercloud_protocol.wire.errors import InvalidRequest

MAX_ID_LENGTH = 200
_SESSION_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{0,63}")
_INDEX = re.compile(r"0|[1-9][0-9]{0,18}")


CURRENT_WEIGHTS = 1 << 62
"""The sampling session of this index plus n samples the current weights of model n of its session.
It exists as long as the model. Clients choose indices below 2**31."""


def new_session_id() -> str:
    """Return a new session id (a UUID4)."""
    return str(uuid.uuid4())


def _fields(text: str, count: int, kind: str, form: str) -> list[str]:
    parts = text.split(":") if len(text) <= MAX_ID_LENGTH else []
    if len(parts) != count or not _SESSION_ID.fullmatch(parts[0]):
        raise InvalidRequest(f"{kind} {text[:MAX_ID_LENGTH]!r} is malformed: expected {form!r}")
    return parts


def _index(text: str, whole: str, kind: str, form: str) -> int:
    if not _INDEX.fullmatch(text):
        raise InvalidRequest(f"{kind} {whole!r} is malformed: expected {form!r}")
    return int(text)


@dataclass(frozen=True, slots=True)
class ModelId:
    """A model under training, and the training run it belongs to."""

    session_id: str
    index: int

    FORM = "<session>:train:<index>"

    @classmethod
    def parse(cls, text: str) -> "ModelId":
        """Read a model id.

        Raises:
            InvalidRequest: it is not of the form `<session>:train:<index>`.
        """
        session_id, role, index = _fields(text, 3, "model_id", cls.FORM)
        if role != "train":
            raise InvalidRequest(f"model_id {text!r} is malformed: expected {cls.FORM!r}")
        return cls(session_id, _index(index, text, "model_id", cls.FORM))

    def __str__(self) -> str:
        return f"{self.session_id}:train:{self.index}"


@dataclass(frozen=True, slots=True)
class SamplingSessionId:
    """A set of weights that one `SamplingClient` samples from."""

    session_id: str
    index: int

    FORM = "<session>:sample:<index>"

    @classmethod
    def parse(cls, text: str) -> "SamplingSessionId":
        """Read a sampling session id.

        Raises:
            InvalidRequest: it is not of the form `<session>:sample:<index>`.
        """
        session_id, role, index = _fields(text, 3, "sampling_session_id", cls.FORM)
        if role != "sample":
            raise InvalidRequest(
                f"sampling_session_id {text!r} is malformed: expected {cls.FORM!r}"
            )
        return cls(session_id, _index(index, text, "sampling_session_id", cls.FORM))

    @classmethod
    def of_current_weights(cls, model_id: ModelId) -> "SamplingSessionId":
        """Return the sampling session of a model's current weights."""
        return cls(model_id.session_id, CURRENT_WEIGHTS + model_id.index)

    @property
    def model(self) -> ModelId | None:
        """The model whose current weights the session samples; None for other sessions."""
        if self.index < CURRENT_WEIGHTS:
            return None
        return ModelId(self.session_id, self.index - CURRENT_WEIGHTS)

    def __str__(self) -> str:
        return f"{self.session_id}:sample:{self.index}"


def model_of_sampler(text: str) -> str | None:
    """Return the model whose current weights a sampling session samples; None for other names."""
    try:
        model_id = SamplingSessionId.parse(text).model
    except InvalidRequest:
        return None
    return str(model_id) if model_id is not None else None


@dataclass(frozen=True, slots=True)
class RequestId:
    """One queued request: the model or sampling session it was sent to, and its seq_id there.

    The creation of a model is its request 0; the SDK numbers the others from 1.
    """

    target: ModelId | SamplingSessionId
    seq_id: int

    FORM = "<session>:train|sample:<index>:<seq_id>"

    @classmethod
    def parse(cls, text: str) -> "RequestId":
        """Read a request id.

        Raises:
            InvalidRequest: it is not one of ours.
        """
        session_id, role, index, seq_id = _fields(text, 4, "request_id", cls.FORM)
        number = _index(index, text, "request_id", cls.FORM)
        if role == "train":
            target: ModelId | SamplingSessionId = ModelId(session_id, number)
        elif role == "sample":
            target = SamplingSessionId(session_id, number)
        else:
            raise InvalidRequest(f"request_id {text!r} is malformed: expected {cls.FORM!r}")
        return cls(target, _index(seq_id, text, "request_id", cls.FORM))

    def __str__(self) -> str:
        return f"{self.target}:{self.seq_id}"

    def sequence_ids(self, num_samples: int) -> list[str]:
        """Return the ids of the sequences that a sampling request with this id will sample."""
        return [f"{self}:{index}" for index in range(num_samples)]
