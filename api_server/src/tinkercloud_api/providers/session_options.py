"""Options that SDK users may set for a run: tags and metadata under `tinkercloud.dev/`.

    TINKER_TAGS=tinkercloud.dev/queue=research,tinkercloud.dev/idle-timeout=7200
    create_lora_training_client(..., user_metadata={"tinkercloud.dev/session": "declared-in-git"})

The metadata of a run takes precedence over that of its session, which takes precedence over tags.
The options are stored in the run's metadata, so that the catalog alone determines its placement.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinkercloud_crds.labels import GROUP
from tinkercloud_protocol.wire.errors import InvalidRequest

PREFIX = f"{GROUP}/"
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_IDLE_SECONDS = (60, 31_536_000)
_IDLE_ACTIONS = {"suspend": "Suspend", "delete": "Delete"}
_FLAGS = {"true": True, "false": False}
_KEEP_SAMPLES = "keep-samples"


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of one run; None for options that are not set."""

    session: str | None = None
    """Existing TrainingSession to attach to, instead of creating one."""
    queue: str | None = None
    """Name of a Kueue LocalQueue."""
    priority: str | None = None
    """Name of a PriorityClass."""
    idle_timeout: int | None = None
    """Idle timeout in seconds."""
    idle_action: str | None = None
    """Action after the idle timeout: `Suspend` or `Delete`."""
    keep_samples: bool | None = None
    """Whether the text of some samples is kept; not about pods."""

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> "SessionOptions":
        """Read the options from metadata.

        Raises:
            InvalidRequest: a key under the prefix is unknown, or its value is invalid.
        """
        chosen: dict[str, Any] = {}
        for key, value in metadata.items():
            if not key.startswith(PREFIX):
                continue
            name = key.removeprefix(PREFIX)
            if name not in _READERS:
                accepted = ", ".join(PREFIX + known for known in _READERS)
                raise InvalidRequest(f"{key}: unknown option; valid options: {accepted}")
            chosen[name.replace("-", "_")] = _READERS[name](key, value)
        return cls(**chosen)

    def set_keys(self) -> list[str]:
        """Return the keys of the options for pods that are set."""
        for_pods = [name for name in _READERS if name != _KEEP_SAMPLES]
        chosen = [name for name in for_pods if getattr(self, name.replace("-", "_")) is not None]
        return [PREFIX + name for name in chosen]


NO_OPTIONS = SessionOptions()


def collect_options(tags: Sequence[str], *metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return all entries under the prefix.

    Args:
        tags: tags; those under the prefix have the form `key=value`.
        metadata: metadata in ascending order of precedence.

    Raises:
        InvalidRequest: a tag under the prefix has no value, or two tags set a key differently.
    """
    entries: dict[str, str] = {}
    for tag in tags:
        if not tag.startswith(PREFIX):
            continue
        key, equals, value = tag.partition("=")
        if not equals:
            raise InvalidRequest(f"tag {tag!r} has no value; use {tag}=VALUE")
        if entries.setdefault(key, value) != value:
            raise InvalidRequest(
                f"tags set {key} to both {entries[key]!r} and {value!r}; set it once"
            )
    for part in metadata:
        entries |= {k: v for k, v in (part or {}).items() if k.startswith(PREFIX)}
    return entries


def _object_name(key: str, value: str) -> str:
    if not _OBJECT_NAME.fullmatch(value):
        raise InvalidRequest(
            f"{key}: {value[:80]!r} is not a valid name of a Kubernetes object (at most 63 of a-z,"
            " 0-9, -)"
        )
    return value


def _seconds(key: str, value: str) -> int:
    least, most = _IDLE_SECONDS
    if not re.fullmatch(r"[0-9]{1,9}", value) or not least <= int(value) <= most:
        raise InvalidRequest(
            f"{key}: got {value[:80]!r}; expected a whole number of seconds from {least} to {most}"
        )
    return int(value)


def _idle_action(key: str, value: str) -> str:
    if value.lower() not in _IDLE_ACTIONS:
        raise InvalidRequest(f"{key}: got {value[:80]!r}; expected 'suspend' or 'delete'")
    return _IDLE_ACTIONS[value.lower()]


def _flag(key: str, value: str) -> bool:
    if value.lower() not in _FLAGS:
        raise InvalidRequest(f"{key}: got {value[:80]!r}; expected 'true' or 'false'")
    return _FLAGS[value.lower()]


_READERS: Mapping[str, Callable[[str, str], str | int]] = {
    "session": _object_name,
    "queue": _object_name,
    "priority": _object_name,
    "idle-timeout": _seconds,
    "idle-action": _idle_action,
    _KEEP_SAMPLES: _flag,
}
