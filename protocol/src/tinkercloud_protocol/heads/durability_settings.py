"""What survives when a head is killed."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

DurabilityLevel = Literal["none", "local", "remote"]


class DurabilityReport(BaseModel):
    """Which models of a head are durable: a line of `routes.HEAD_LEASE`, sent when it changes."""

    # Heads of later releases may report more.
    model_config = ConfigDict(frozen=True, extra="ignore")

    generation: str
    """Generation of the head."""
    models: dict[str, str | None]
    """Why a model is less safe than its level promises, by id; None for one that isn't."""


class DurabilityConfig(BaseModel):
    """What survives when a head is killed, and what that may cost."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    level: DurabilityLevel = "local"
    """`none`: a run continues from its last checkpoint. `local`: each training request is written
    to a journal on the local disk before it is confirmed, and the next head on the same machine
    continues the run where it was. `remote`: the journal and the snapshots are also copied to the
    checkpoint store, and a head on another machine continues the run."""
    wait_for_store: bool = True
    """With `remote`: whether requests are confirmed, and results given, only once the requests are
    in the checkpoint store. If false, a lost disk loses the requests of the last `store_seconds`.
    """
    store_seconds: Annotated[float, Field(gt=0)] = 1.0
    """With `remote`, without `wait_for_store`: time, in seconds, after which a request is copied to
    the checkpoint store."""
    store_bytes: Annotated[int, Field(ge=1)] = 8 << 20
    """With `remote`: size of waiting requests, in bytes, at which they are copied at once, and from
    which on further requests are copied separately."""
    store_timeout_seconds: Annotated[float, Field(gt=0)] = 10.0
    """With `remote`: time, in seconds, that the checkpoint store has for one write of requests.
    After that, training continues without the store (degraded), and the write is tried again."""
    max_waiting_bytes: Annotated[int, Field(ge=1)] = 256 << 20
    """With `remote`: size of a head's requests in memory, in bytes, that wait for a store that
    doesn't respond. Beyond it those of the run with most of them are dropped, and a snapshot
    replaces them when it responds."""
    fsync: bool = False
    """Whether results also wait until the journal is on the disk, and not only in the kernel. Only
    needed to survive a power failure or a crash of the machine."""
    snapshot_steps: Annotated[int, Field(ge=1)] = 100
    """Number of optimizer steps after which a snapshot replaces the journal. The next head repeats
    the steps since the last snapshot."""
    snapshot_seconds: Annotated[float, Field(gt=0)] = 120.0
    """Time, in seconds, after which a step is in a snapshot, if fewer than `snapshot_steps` have
    followed."""
    max_journal_bytes: Annotated[int, Field(ge=1)] = 512 << 20
    """Size of one run's journal, in bytes, at which a snapshot is taken. If none can be written
    before the journal is twice as large, the run continues without a journal (degraded)."""
    max_disk_bytes: Annotated[int, Field(ge=1)] | None = None
    """Size of the journals and snapshots of all runs of a head, in bytes. Beyond it, the largest
    run of the owner who uses the most space continues without a journal (degraded). A snapshot
    replaces the last one only once it is complete, so there must be room for both. If unset, only
    the size of the disk limits them."""
    exact: bool = False
    """Whether requests of adapters run alone, so that repeated steps have the same bits even if
    several runs train at the same time. If false, runs share passes, and a step that is repeated
    alone may differ by rounding from the first time."""
    whole_model_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Time, in seconds, after which a step of a fully fine-tuned model is in a snapshot, instead of
    `snapshot_steps` and `snapshot_seconds`: one writes 12 bytes per parameter. Longer if a snapshot
    takes more than 5 % of that time."""
