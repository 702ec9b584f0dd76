"""The checkpoint manifest: the file whose presence makes a checkpoint exist.

Layout of `<root>/runs/<run id>/<kind>/<name>/`:

    manifest.json                  written last, replaced atomically
    adapter_model.safetensors      LoRA weights in PEFT's naming, those of experts stacked
                                   as Tinker's                           (LoRA runs)
    adapter_config.json            PEFT configuration                    (LoRA runs)
    model.safetensors              all trained weights, by parameter name (full fine-tuning)
    optimizer.safetensors          AdamW moments, named like the weights  (kind `weights`)
    trainer_state.json             step counter                           (kind `weights`)
    gradient.safetensors           gradient that was not applied yet, float32, named like the
                                   weights                               (kind `weights`)

Checkpoints of kind `weights` whose names start with `autosave-step-` are written by the head
itself, which keeps the latest two. They have no gradient.

The kind `external_weights` holds files for other programs: the two files of an adapter, or, after
full fine-tuning, a Hugging Face folder. If they are encrypted, each is named `<file>.age`.

`CheckpointManifest.data_prefix` is the sub-folder of the files. It is empty, except in copies and
during an overwrite: the new files are written to a new sub-folder, the manifest is switched to it,
the files are written to their final place, and the manifest is switched back. So a reader sees the
old checkpoint or the new one, never a mixture, wherever the writer crashes.

`<root>/runs/<run id>/suspended/` holds the state of a run whose head stopped: `manifest.json`, a
`SuspendedManifest`, and the sub-folder it names, which contains the same files and also

    head.json, bodies.bin          waiting requests, results that may be requested, samplers
    sampler-<digest>.safetensors   weights of unnamed versions

The folder remains after the run was resumed in another head, until the run is suspended again or
deleted; its generation prevents it from being used twice. A head that resumes a run that it
suspended itself deletes the folder first.

`<root>/runs/<run id>/evicted/` has weights of unnamed versions that a head had no room for, one
file each. `head.json` names those of a suspended run; they are not copied.

Each file of a checkpoint is in its manifest with its SHA-256, and so is the manifest itself
(`checksum`, over all its other keys), so that damage is detected.

Compatibility: readers ignore unknown keys; a change that an old reader would misread raises
`format_version`, and readers reject versions that they do not know (`releases.Versions`). The key
`release` names the release that wrote the file.
"""

import hashlib
from datetime import datetime
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

import orjson
from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from tinkercloud_protocol.adapters.fingerprints import BaseFingerprint
from tinkercloud_protocol.heads.releases import Versions, this_release
from tinkercloud_protocol.requests.hyperparameters import LoraConfig
from tinkercloud_protocol.requests.training_requests import OptimizerConfig
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import describe
from tinkercloud_protocol.wire.paths import MANIFEST_NAME, CheckpointPath, suspended_prefix

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
FULL_WEIGHTS = "model.safetensors"
OPTIMIZER_STATE = "optimizer.safetensors"
TRAINER_STATE = "trainer_state.json"
GRADIENT = "gradient.safetensors"
ENCRYPTED_SUFFIX = ".age"
"""Appended to the names of encrypted files."""
HEAD_STATE = "head.json"
BODIES = "bodies.bin"

_CHECKSUM = "checksum"
_RELEASE = "release"
_VERSION = "format_version"
_MAX_LINEAGE = 8


class StoredFile(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    size_bytes: int
    sha256: str
    """Lower-case hex digest, checked on every load."""


class ImportedAdapter(BaseModel):
    """How the files of an imported adapter differ from those of our own.

    `adapter_model.safetensors` is PEFT's file as it was uploaded: any of PEFT's names, floating
    dtypes and subsets of the base model's weights. There is no optimizer state.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    scale: float
    """Factor of B @ A."""


class CheckpointManifest(BaseModel):
    """Metadata of a checkpoint, and the list of its files."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    versions: ClassVar[Versions] = Versions(1, 3)
    format_version: int = versions.newest
    """1 and 2 differ from 3 in nothing but the number, which said whether there was a gradient."""
    tinker_path: str
    owner: str
    base_model: str
    base_fingerprint: str | None = None
    """`BaseFingerprint` of the model that was trained; absent if the head did not know it."""
    lora: LoraConfig | None
    """None for a fully fine-tuned model."""
    optimizer: OptimizerConfig = OptimizerConfig()
    step: int
    """Number of optimizer steps taken."""
    created_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    user_metadata: dict[str, str] | None = None
    saved_by: str | None = None
    """Id of the request that saved it. If another head repeats that request, it is done already."""
    copied_from: str | None = None
    """`tinker://` path of the checkpoint that this one is a copy of."""
    imported: ImportedAdapter | None = None
    """Set if the adapter was imported and not trained here."""
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
        """Return whether its time to live has passed."""
        return self.expires_at is not None and self.expires_at <= now

    def key_of(self, file_name: str) -> str:
        """Return the object key of one of its files."""
        folder = self.path.prefix
        return "/".join(part for part in (folder, self.data_prefix, file_name) if part)

    @property
    def object_keys(self) -> frozenset[str]:
        """Object keys of its files, and of the manifest itself: no others belong to it."""
        return frozenset({self.path.manifest_key, *map(self.key_of, self.files)})

    def __str__(self) -> str:
        return self.tinker_path


class SuspendedManifest(BaseModel):
    """Metadata of the state of a suspended run, and the list of its files."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    versions: ClassVar[Versions] = Versions(1, 1)
    format_version: int = versions.newest
    run_id: str
    generation: str
    """Generation of the head that wrote the state."""
    continues: list[str] = []
    """Earlier generations, oldest first. A head may be suspended before the catalog has recorded
    that it resumed the run; the state is then still looked up under the generation that it was
    resumed from."""
    owner: str
    base_model: str
    base_fingerprint: str | None = None
    """See `CheckpointManifest.base_fingerprint`."""
    lora: LoraConfig | None
    step: int | None = None
    """Number of optimizer steps that the model had taken when it was written."""
    created_at: AwareDatetime
    data_prefix: str
    files: dict[str, StoredFile]

    def continues_from(self, generation: str) -> bool:
        """Return whether it continues the run's state in the head of that generation."""
        return generation in self.lineage

    @property
    def lineage(self) -> list[str]:
        """The generations that the state continues, ending with its writer's."""
        return [*self.continues, self.generation][-_MAX_LINEAGE:]

    def key_of(self, file_name: str) -> str:
        """Return the object key of one of its files."""
        return f"{suspended_prefix(self.run_id)}/{self.data_prefix}/{file_name}"

    @property
    def object_keys(self) -> frozenset[str]:
        """See `CheckpointManifest.object_keys`."""
        return frozenset({suspended_key(self.run_id), *map(self.key_of, self.files)})

    def __str__(self) -> str:
        return f"the suspended state of training run {self.run_id}"


class Manifest(Protocol):
    """What a file with a checksum describes."""

    versions: ClassVar[Versions]
    """The versions of its format that this release reads."""

    def model_dump(self, *, mode: Literal["json"]) -> dict[str, Any]:
        """Return its fields."""

    @classmethod
    def model_validate_json(cls, json_data: bytes) -> Self:
        """Read its fields."""


ManifestT = TypeVar("ManifestT", bound=Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the encoded manifest, including this release and its checksum."""
    fields = {**manifest.model_dump(mode="json"), _RELEASE: this_release()}
    return orjson.dumps({**fields, _CHECKSUM: _checksum(fields)}, option=orjson.OPT_INDENT_2)


def decode_manifest(model: type[ManifestT], content: bytes, name: str) -> ManifestT:
    """Read an encoded manifest.

    Args:
        model: Type of the manifest.
        content: Content of the file.
        name: Name of the checkpoint in error messages.

    Raises:
        InvalidRequest: The manifest is damaged, or a newer release wrote it.
    """
    try:
        fields = orjson.loads(content)
        check_version(model, fields, name)
        manifest = model.model_validate_json(content)
    except ValidationError as error:
        raise InvalidRequest(
            f"{name} can't be read: its manifest is damaged ({describe(error)}); use another"
            " checkpoint"
        ) from None
    except ValueError:
        raise InvalidRequest(
            f"{name} can't be read: its manifest is damaged (it is not JSON)"
        ) from None
    checksum = fields.pop(_CHECKSUM, None)
    if checksum != _checksum(fields):
        how = "lacks" if checksum is None else "differs from"
        raise InvalidRequest(
            f"{name} can't be read: its manifest is damaged (it {how} its checksum)"
        )
    return manifest


def check_version(model: type[Manifest], fields: object, name: str) -> None:
    """Check that this release reads the version that the fields of a manifest name.

    Args:
        model: Type of the manifest.
        fields: Its fields, as decoded from JSON. Without a version they are checked by `model`.
        name: Name of the checkpoint, or of what else has the manifest, in error messages.

    Raises:
        InvalidRequest: It has another version, which the message names, like those it may have.
    """
    found = fields.get(_VERSION) if isinstance(fields, dict) else None
    if not isinstance(found, int):
        return
    release = fields.get(_RELEASE) if isinstance(fields, dict) else None
    writer = release if isinstance(release, str) else None
    if why := model.versions.refusal(f"its {MANIFEST_NAME}", found, writer):
        raise InvalidRequest(
            f"{name} can't be read: {why}, or a checkpoint or backup that this release wrote"
        )


def _checksum(fields: dict[str, Any]) -> str:
    # Over all keys of the file, including those of newer releases.
    return hashlib.sha256(orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)).hexdigest()


def suspended_key(run_id: str) -> str:
    """Return the key of a run's `SuspendedManifest`."""
    return f"{suspended_prefix(run_id)}/{MANIFEST_NAME}"


def base_mismatch(saved: CheckpointManifest | SuspendedManifest, served: str | None) -> str | None:
    """Return how the base model of a saved run differs from the served one, as a sentence.

    Returns None if it does not differ, or if this is unknown. A fully fine-tuned model needs none
    of the base model's weights, but the same computation.

    Args:
        saved: CheckpointManifest of the run's checkpoint.
        served: `BaseFingerprint` of the model that the head serves; None if unknown.
    """
    if saved.base_fingerprint is None or served is None:
        return None
    before, now = (BaseFingerprint.parse(each) for each in (saved.base_fingerprint, served))
    if before is None or now is None:
        return None
    if before.config != now.config:
        difference = "the base model's config.json differs from the one"
    elif before.weights != now.weights and saved.lora is not None:
        difference = "the base model's weights differ from those"
    else:
        return None
    return (
        f"{difference} that the run was saved with (fingerprint {saved.base_fingerprint} then,"
        f" {served} now); serve the {saved.base_model} that it was trained on, or start a new run"
    )
