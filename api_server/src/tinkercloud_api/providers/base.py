"""Interface of the providers of session heads."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

from tinkercloud_api.providers.session_options import NO_OPTIONS, SessionOptions
from tinkercloud_crds.quota_fields import Tenant
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.heads.reports.kept_samples import SampleReport
from tinkercloud_protocol.heads.reports.thinned_curves import CurveReport
from tinkercloud_protocol.heads.reports.usage_reports import UsageReport
from tinkercloud_protocol.responses.listings import GpuUse, PoolUse
from tinkercloud_protocol.wire.errors import WireError
from tinkercloud_protocol.wire.future_responses import QueueState

HeadReport = UsageReport | CurveReport | SampleReport
RecordReport = Callable[[HeadReport], Awaitable[None]]
"""Records a report of a head, which may be repeated. Raises Unavailable if it can't."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model that can be trained and sampled."""

    name: str
    max_context_length: int
    architecture: str | None = None
    local_path: str | None = None
    """Folder of the model, if it is on this machine."""
    tokenizer: str | None = None
    """Name under which clients on any machine can load the tokenizer; None if they can use `name`
    or, on this machine, `local_path`."""
    aliases: tuple[str, ...] = ()
    """Other names that an operator configured for it (`model_names.with_aliases`)."""
    reads_images: bool = False
    """Whether its prompts may contain images, as far as this server knows."""
    max_lora_rank: int | None = None
    """Maximum rank of an adapter; None if only its heads know."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which clients can request it."""
        return (self.name, *self.aliases)


def unknown_base_model(name: str, models: Iterable[ServedModel]) -> str:
    """Return the error message for a base model that is not among the served ones."""
    served = ", ".join(repr(name) for model in models for name in model.names) or "none"
    return f"base_model {name!r} is not served here; served base models: {served}"


@dataclass(frozen=True, slots=True)
class Placement:
    """A training run or sampling session that needs a head."""

    target: str
    """Id of the training run or sampling session."""
    owner: str
    base_model: str
    model: ModelSpec | None = None
    """The model to train; None for samplers of a base model or of a saved checkpoint."""
    options: SessionOptions = NO_OPTIONS
    """Options that the run's client set for its pods."""


@dataclass(frozen=True, slots=True)
class HeadEndpoint:
    """Address and token of a head. A restarted head has another generation."""

    url: str
    token: str
    generation: str

    def __repr__(self) -> str:
        return f"HeadEndpoint(url={self.url!r}, generation={self.generation!r})"


@dataclass(frozen=True, slots=True)
class Pending:
    """A head that is not ready yet: the SDK's queue state, and a human-readable reason."""

    queue_state: QueueState
    reason: str


@dataclass(frozen=True, slots=True)
class FailingCondition:
    """A condition of a Kubernetes object that needs somebody's attention."""

    kind: Literal["model", "pool", "session"]
    name: str
    """Name of the object."""
    owner: str | None
    """Whose session it is; None for what only administrators see."""
    model_id: str | None
    """The run that the session serves; None if it serves none."""
    reason: str
    remedy: str
    since: datetime | None
    """When its status last changed; None if that can't be read."""


@dataclass(frozen=True, slots=True)
class HeadEnd:
    """The end of a run's head, for good."""

    is_over: bool
    """Whether it has ended; otherwise it saves a last checkpoint, or stops if it never ran."""
    reason: str
    has_run: bool = True
    """Whether it ever ran; there is nothing to save or to continue of one that never did."""


class HeadFailed(WireError):
    """A head failed to start; the message describes the failure. Repeating the request retries."""

    status = 503
    category = "server"


class SessionProvider(Protocol):
    """Starts, finds and stops session heads.

    The methods with a body are right for heads that all runs of a base model share, that stay where
    they are, and that leave nothing on a disk of this server.
    """

    async def start(self, record_report: RecordReport) -> None:
        """Find running heads and start watching them. If it fails, it ends what it started.

        Args:
            record_report: called with each report of what a head has used, trained or sampled.
        """

    async def stop(self) -> None:
        """Stop everything that must not outlive this process."""

    def models(self) -> list[ServedModel]:
        """Return the served base models."""

    def tenants(self) -> Sequence[Tenant]:
        """Return the tenants, oldest first; the same object while nothing changes."""

    async def admit(self, placement: Placement) -> ModelSpec:
        """Return the spec of a new run: as requested, completed from the session it attaches to.

        Raises:
            NotFound: the session to attach to does not exist for the run's owner.
            InvalidRequest: the base model is not served, or an option is not allowed.
            Unavailable: this cannot be determined now.
        """

    def find(self, placement: Placement) -> HeadEndpoint | None:
        """Return the head that serves a placement now, or None. The call counts as activity."""

    async def acquire(self, placement: Placement) -> HeadEndpoint:
        """Return a head for a placement; start one if needed, and wait until it is ready.

        Cancelling this call ends the wait, but not the start of the head.

        Raises:
            NotFound: the base model is not served.
            StateLost: the placement's head was permanently removed.
            HeadFailed: the head failed to start.
        """

    async def changed(self, placement: Placement) -> None:
        """Wait until something about a placement changes that may give it another head."""
        return

    async def confirm(self, placement: Placement) -> None:
        """Check that what this server knows of a placement is up to date.

        Raises:
            Unavailable: it is not, or this cannot be determined now.
        """
        return

    def pending(self, placement: Placement) -> Pending:
        """Return why `acquire` has not returned yet."""

    def state_of(self, model: ServedModel) -> str | None:
        """Return whether a model is ready, is loading or has failed, and why or how far.

        None if that differs between runs.
        """
        return None

    def failing_conditions(self) -> list[FailingCondition]:
        """Return the conditions of sessions, pools and base models that need attention."""
        return []

    def pools(self) -> Mapping[str, PoolUse]:
        """Return the use of each pool, by name of its base model; none on one machine."""
        return {}

    def gpus_of(self, model: ServedModel) -> GpuUse | None:
        """Return the GPUs that the pods of a model hold; None if it has no pods."""
        return None

    def shared_heads(self) -> list[HeadEndpoint]:
        """Return the running heads that are shared by many runs, whose idle models are suspended.

        Heads that serve a single run are not included; their providers suspend the whole head.
        """

    def heads_of(self, owner: str) -> list[HeadEndpoint]:
        """Return the running heads that may have something of an owner: shared ones, and its own.

        This is no use of the heads: none is resumed, or kept from being suspended.
        """
        return self.shared_heads()

    def placed_on(self, endpoint: HeadEndpoint) -> frozenset[str] | None:
        """Return the runs that have a place on a shared head; None if runs have no places."""
        return None

    def clusters(self) -> Mapping[str, str]:
        """Return the cluster of each run that has a place on one, by run; none on one machine."""
        return {}

    def clusters_of_heads(self) -> Mapping[HeadEndpoint, str]:
        """Return the names of the clusters with the shared heads; none on one machine."""
        return {}

    def end_of(self, placement: Placement) -> HeadEnd | None:
        """Return the end of the head that `acquire` created for a run; None if it has none."""
        return None

    def runs(self) -> list[str]:
        """Return the runs that have a place, on a head of their own or on a shared one."""
        return []

    def has_own_head(self, placement: Placement) -> bool:
        """Whether the head of a run serves no other run."""
        return False

    def degraded(self) -> Mapping[str, str]:
        """Return runs that are less safe than `durability.level` promises, with the reasons.

        Those of `shared_heads` may be missing: they are asked themselves.
        """
        return {}

    async def is_gone(self, placement: Placement) -> bool:
        """Whether the head that `acquire` created for a placement was permanently removed.

        Raises:
            Unavailable: this cannot be determined now.
        """
        return False

    def has_ended(self, placement: Placement, generation: str) -> bool:
        """Whether all processes of the head with this generation have ended.

        An ended head cannot write any more. False if this is not known.
        """
        return False

    def unsaved(self, placement: Placement) -> Path | None:
        """Return the folder for suspended runs that could not be uploaded, or None."""
        return None

    def journals(self, placement: Placement) -> Path | None:
        """Return the folder of the journals of runs (`protocol.journals`), or None."""
        return None

    def may_have_journals(self, placement: Placement) -> bool:
        """Whether only the next head can tell if it has the journal of a run."""
        return False

    def newly_ended(self) -> list[str]:
        """Return the generations of the heads that have ended since the last call."""
        return []

    def invalidate(self, endpoint: HeadEndpoint) -> None:
        """Look up this endpoint again before its next use: another head now serves there."""
        return

    async def release(self, placement: Placement) -> None:
        """Remove the head that `acquire` created for this placement alone. This is idempotent.

        Raises:
            Unavailable: the head cannot be removed now.
        """
        return
