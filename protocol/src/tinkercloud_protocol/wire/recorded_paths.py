"""Paths of recorded sessions: `/oai/sessions/<name>/<action>`.

The name starts with the sampling session that the session is recorded from. The API server routes
by the sampling session, and the head looks up the name.
"""

import re
from dataclasses import dataclass

from tinkercloud_protocol.wire import routes

_SEPARATOR = "~"
"""Between the sampling session and the rest of a name; ids of sampling sessions have none."""
CHAT = "v1/chat/completions"
"""Adds turns: the base URL of OpenAI clients is `<session>/v1`."""
DATUMS = "datums"
"""Returns the turns as training data."""
MODELS = "v1/models"
"""Lists the model of the session, for clients that look for it."""
SHOW = "show"
"""Describes the session, at heads; clients send GET to the session's own path."""
DELETE = "delete"
"""Deletes the session, at heads; clients send DELETE to the session's own path."""
_PATH = re.compile(rf"{routes.OPENAI_SESSIONS}/([^/]*)(?:/(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RecordedPath:
    """The parts of a path."""

    name: str
    """Name of the recorded session; of a malformed one, anything without a slash."""
    sampler_id: str
    """The sampling session in the name."""
    action: str
    """One of the actions above, the empty string for the session, or anything else."""


def recorded_name(sampler_id: str, suffix: str) -> str:
    """Return the name of a recorded session of a sampling session."""
    return f"{sampler_id}{_SEPARATOR}{suffix}"


def sampler_of(name: str) -> str:
    """Return the sampling session in a name, which may be malformed."""
    return name.partition(_SEPARATOR)[0]


def parse(path: str) -> RecordedPath | None:
    """Return the parts of a path; None if it is not the path of a recorded session."""
    if (found := _PATH.fullmatch(path)) is None:
        return None
    name, action = found[1], found[2] or ""
    sampler_id, separator, _ = name.partition(_SEPARATOR)
    return RecordedPath(name, sampler_id, action) if separator else None
