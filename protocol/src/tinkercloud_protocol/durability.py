"""What survives when a head is killed."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tinkercloud_protocol.hyperparameters import LoraConfig


class DurabilityConfig(BaseModel):
    """What survives when a head is killed, and what that may cost."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    level: Literal["none", "local"] = "local"
    """`none`: a run continues from its last checkpoint. `local`: each training request is written
    to a journal on the local disk before it is confirmed, and the next head on the same machine
    continues the run where it was."""
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
    exact: bool = False
    """Whether requests of adapters run alone, so that repeated steps have the same bits even if
    several runs train at the same time. If false, runs share passes, and a step that is repeated
    alone may differ by rounding from the first time."""
    whole_models: bool = False
    """Whether fully fine-tuned models have a journal as well. Each snapshot writes 12 bytes per
    parameter, and takes twice as much memory in the head while it is written."""

    def applies_to(self, lora: LoraConfig | None) -> bool:
        """Return whether a model with this adapter, or without one, has a journal."""
        return self.level == "local" and (lora is not None or self.whole_models)
