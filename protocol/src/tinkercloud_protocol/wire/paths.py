"""`tinker://` paths: their grammar, and the location of a checkpoint in the object store.

    tinker://<run id>/<kind>/<name>        path used by clients; exactly three segments
    runs/<run id>/<kind>/<name>/           folder under the root of the store
    runs/<run id>/suspended/               state of a suspended run; not a checkpoint

A name is one plain path segment, so a path can never leave its run's folder. The grammar is the
SDK's (`ParsedCheckpointTinkerPath`), restricted to a closed set of characters.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.ids import ModelId

SCHEME = "tinker://"
_AUTOSAVE = "autosave-step-"
"""Start of the names of automatic checkpoints, which clients may not use for theirs."""
MANIFEST_NAME = "manifest.json"
_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.=+@,-]{0,127}")
_NAME_RULE = (
    "1 to 128 of the characters A-Z a-z 0-9 _ . = + @ , - and start with a letter, a digit or _"
)


class CheckpointKind(StrEnum):
    """The purpose of a checkpoint; the value is the path's middle segment."""

    TRAINING = "weights"
    """Weights and optimizer state, from which training can be resumed."""
    SAMPLER = "sampler_weights"
    """Weights only, for sampling."""
    EXTERNAL = "external_weights"
    """Weights only, as files for other programs, which may be encrypted."""

    @property
    def checkpoint_type(self) -> str:
        """The SDK's name of the kind, as in `Checkpoint.checkpoint_type`."""
        return {
            CheckpointKind.TRAINING: "training",
            CheckpointKind.SAMPLER: "sampler",
            CheckpointKind.EXTERNAL: "external",
        }[self]


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """One named checkpoint of one training run."""

    run_id: str
    kind: CheckpointKind
    name: str

    def __post_init__(self) -> None:
        ModelId.parse(self.run_id)
        if not _NAME.fullmatch(self.name):
            raise InvalidRequest(
                f"checkpoint name {self.name[:160]!r} is not allowed: use {_NAME_RULE}"
            )

    @classmethod
    def parse(cls, uri: str) -> "CheckpointPath":
        """Read `tinker://<run id>/<kind>/<name>`.

        Raises:
            InvalidRequest: another scheme, another number of segments, an unknown kind, or a
                run id or name outside the grammar.
        """
        segments = uri.removeprefix(SCHEME).split("/") if uri.startswith(SCHEME) else []
        if len(segments) != 3:
            raise InvalidRequest(
                f"path {uri[:300]!r} is not a checkpoint: expected"
                " 'tinker://<training run id>/weights|sampler_weights|external_weights/<name>'"
            )
        run_id, kind, name = segments
        return cls(run_id, parse_kind(kind), name)

    @classmethod
    def of_autosave(cls, run_id: str, step: int) -> "CheckpointPath":
        """Return the path of a run's automatic checkpoint after an optimizer step."""
        return cls(run_id, CheckpointKind.TRAINING, f"{_AUTOSAVE}{step:06d}")

    @property
    def is_autosave(self) -> bool:
        """Whether a head wrote it by itself. It replaces and deletes these, unless it is killed."""
        return self.kind is CheckpointKind.TRAINING and is_reserved(self.name)

    @classmethod
    def of_checkpoint_id(cls, run_id: str, checkpoint_id: str) -> "CheckpointPath":
        """Join a training run id and a checkpoint id such as `weights/step-10`.

        Raises:
            InvalidRequest: the checkpoint id is not `<kind>/<name>`.
        """
        kind, slash, name = checkpoint_id.partition("/")
        if not slash:
            raise InvalidRequest(
                f"checkpoint id {checkpoint_id[:200]!r} is malformed: expected"
                " 'weights/<name>', 'sampler_weights/<name>' or 'external_weights/<name>'"
            )
        return cls(run_id, parse_kind(kind), name)

    def require_loadable(self) -> None:
        """Check that a server can train or sample from checkpoints of this kind.

        Raises:
            InvalidRequest: it holds files for other programs.
        """
        if self.kind is CheckpointKind.EXTERNAL:
            raise InvalidRequest(
                f"{self} holds files for download and can't be loaded: save_state and"
                " save_weights_for_sampler write checkpoints that can"
            )

    @property
    def checkpoint_id(self) -> str:
        """`<kind>/<name>`, unique within the run."""
        return f"{self.kind}/{self.name}"

    @property
    def prefix(self) -> str:
        """The checkpoint's folder in the object store, without a slash at either end."""
        return f"{run_prefix(self.run_id)}/{self.kind}/{self.name}"

    @property
    def manifest_key(self) -> str:
        """Key of the manifest; the checkpoint exists if this object does."""
        return f"{self.prefix}/{MANIFEST_NAME}"

    def __str__(self) -> str:
        return f"{SCHEME}{self.run_id}/{self.kind}/{self.name}"


def is_reserved(name: str) -> bool:
    """Return whether a name of training checkpoints is reserved for automatic ones."""
    return name.startswith(_AUTOSAVE)


def run_prefix(run_id: str) -> str:
    """Return the folder of a run's checkpoints in the object store."""
    return f"runs/{run_id}"


def suspended_prefix(run_id: str) -> str:
    """Return the folder of a run's suspended state. Clients cannot name it: it is not a kind."""
    return f"{run_prefix(run_id)}/suspended"


def evicted_prefix(run_id: str) -> str:
    """Return the folder of a run's unnamed sampler versions that its head had no room for."""
    return f"{run_prefix(run_id)}/evicted"


def state_prefixes(run_id: str) -> tuple[str, ...]:
    """Return the folders with what is deleted with a run, unlike its checkpoints."""
    return suspended_prefix(run_id), evicted_prefix(run_id)


def parse_kind(segment: str) -> CheckpointKind:
    """Read the middle segment of a path.

    Raises:
        InvalidRequest: The segment is not a known kind.
    """
    try:
        return CheckpointKind(segment)
    except ValueError:
        kinds = " or ".join(repr(str(kind)) for kind in CheckpointKind)
        raise InvalidRequest(
            f"checkpoint kind {segment[:64]!r} is unknown: expected {kinds}"
        ) from None
