"""The checkpoint manifest: the file whose presence makes a checkpoint exist.

Layout of `<root>/runs/<run id>/<kind>/<name>/`:

    manifest.json                  written last, replaced atomically
    adapter_model.safetensors      LoRA weights in PEFT's naming, those of experts stacked
                                   as Tinker's                           (LoRA runs)
    adapter_config.json            PEFT configuration                    (LoRA runs)
    model.safetensors              all trained weights, by parameter name (full fine-tuning)
    optimizer.safetensors          AdamW moments, named like the weights  (kind `weights`)
    trainer_state.json             step counter                           (kind `weights`)

`Manifest.data_prefix` is the sub-folder the files are read from. It is empty except in the moments
of an overwrite: the new files go to a fresh sub-folder, the manifest is switched to it, the files
are written in their place, and the manifest is switched back. So a reader sees the old checkpoint
or the new one, never a mixture, wherever the writer dies.

`<root>/runs/<run id>/suspended/` holds what a head that stopped left of a run: `manifest.json`, a
`SuspendedManifest`, and the sub-folder it names with the same files and besides

    gradient.safetensors           gradient that no optim_step has applied, if there is any
    head.json, bodies.bin          requests that wait, results that may be asked for, samplers
    sampler-<digest>.safetensors   weights of samplers that were never saved under a name

It goes on to exist after the run was resumed in another head, until the run is suspended again or
deleted; its generation keeps it from being used twice. A head that resumes what it has suspended
itself deletes it first.

Compatibility: readers ignore unknown keys; a change that an old reader would misread raises
`format_version`, and readers refuse versions they don't know.
"""

from datetime import datetime
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict

from tinkercloud_protocol.hyperparameters import LoraConfig
from tinkercloud_protocol.paths import MANIFEST_NAME, CheckpointPath, suspended_prefix
from tinkercloud_protocol.training import OptimizerConfig

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
FULL_WEIGHTS = "model.safetensors"
OPTIMIZER_STATE = "optimizer.safetensors"
TRAINER_STATE = "trainer_state.json"
GRADIENT = "gradient.safetensors"
HEAD_STATE = "head.json"
BODIES = "bodies.bin"

_MAX_LINEAGE = 8


class StoredFile(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    size_bytes: int
    sha256: str
    """Lower-case hex; checked on every load."""


class Manifest(BaseModel):
    """What a checkpoint is, and which files it consists of."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    format_version: Literal[1] = 1
    tinker_path: str
    owner: str
    base_model: str
    lora: LoraConfig | None
    """None for a fully fine-tuned model."""
    optimizer: OptimizerConfig = OptimizerConfig()
    step: int
    """Optimizer steps taken."""
    created_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    user_metadata: dict[str, str] | None = None
    data_prefix: str = ""
    files: dict[str, StoredFile]

    @property
    def path(self) -> CheckpointPath:
        """The checkpoint's own path."""
        return CheckpointPath.parse(self.tinker_path)

    @property
    def size_bytes(self) -> int:
        """Total size of its files."""
        return sum(file.size_bytes for file in self.files.values())

    def is_expired(self, now: datetime) -> bool:
        """Whether its time to live has passed."""
        return self.expires_at is not None and self.expires_at <= now

    def key_of(self, file_name: str) -> str:
        """Return the object key of one of its files."""
        folder = self.path.prefix
        return "/".join(part for part in (folder, self.data_prefix, file_name) if part)

    def __str__(self) -> str:
        return self.tinker_path


class SuspendedManifest(BaseModel):
    """What a head left of a run it stopped, and which files that consists of."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    format_version: Literal[1] = 1
    run_id: str
    generation: str
    """Of the head that wrote it."""
    continues: list[str] = []
    """Generations before that, oldest first. A head may be suspended before anybody has noted that
    it resumed the run; the state is still looked for under the generation it was resumed from."""
    owner: str
    base_model: str
    lora: LoraConfig | None
    created_at: AwareDatetime
    data_prefix: str
    files: dict[str, StoredFile]

    def goes_on_from(self, generation: str) -> bool:
        """Whether it holds all that a run had become in the head of that generation."""
        return generation in self.lineage

    @property
    def lineage(self) -> list[str]:
        """The generations it goes on from, its writer's last."""
        return [*self.continues, self.generation][-_MAX_LINEAGE:]

    def key_of(self, file_name: str) -> str:
        """Return the object key of one of its files."""
        return f"{suspended_prefix(self.run_id)}/{self.data_prefix}/{file_name}"

    def __str__(self) -> str:
        return f"the suspended state of training run {self.run_id}"


def suspended_key(run_id: str) -> str:
    """Return the key of a run's `SuspendedManifest`."""
    return f"{suspended_prefix(run_id)}/{MANIFEST_NAME}"
