"""The objects of the namespace that a release's values name, and the volumes it creates: pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinkercloud_api.cluster_check.values import Release

SHARED = "ReadWriteMany"
PULL_KEY = ".dockerconfigjson"


@dataclass(frozen=True, slots=True)
class Entries:
    """A Secret or ConfigMap that must exist."""

    field: str
    """The value that names it."""
    name: str
    keys: frozenset[str] = frozenset()
    """Entries that it must have."""


@dataclass(frozen=True, slots=True)
class NewVolume:
    """A PersistentVolumeClaim that the chart creates."""

    field: str
    modes: Sequence[str]
    storage_class: str
    """Empty for the cluster's default."""


@dataclass(frozen=True, slots=True)
class ExistingVolume:
    """A PersistentVolumeClaim that must exist."""

    field: str
    name: str
    is_shared: bool
    """Whether pods on several nodes write to it."""


def secrets(release: Release) -> Iterator[Entries]:
    """Yield the Secrets that the values name."""
    values = release.values
    api = values["apiServer"]
    named = (
        ("database.existingSecret", values["database"]["existingSecret"], "url"),
        ("checkpoints.existingSecret", values["checkpoints"]["existingSecret"], ""),
        ("apiServer.bootstrapKey.existingSecret", api["bootstrapKey"]["existingSecret"], "key"),
        ("apiServer.downloads.existingSecret", api["downloads"]["existingSecret"], "key"),
        ("oidc.existingSecret", values["oidc"]["existingSecret"], "clientSecret"),
    )
    for field, name, key in named:
        if name:
            yield Entries(field, name, frozenset({key} if key else ()))
    for name in values["image"]["pullSecrets"] or []:
        yield Entries("image.pullSecrets", name, frozenset({PULL_KEY}))
    for name, model in release.models.items():
        if model.source.secret_name is not None:
            yield Entries(f"source.secretName of {name}", model.source.secret_name)


def config_maps(release: Release) -> Iterator[Entries]:
    """Yield the ConfigMaps that the values name."""
    bundle = release.values["caBundle"]
    if bundle["configMap"]:
        yield Entries("caBundle.configMap", bundle["configMap"], frozenset({bundle["key"]}))


def new_volumes(release: Release) -> Iterator[NewVolume]:
    """Yield the claims that the chart creates."""
    for field, part in _volumes(release):
        volume = part["volume"]
        if not volume["existingClaim"]:
            yield NewVolume(field, volume["accessModes"], volume["storageClassName"] or "")


def existing_volumes(release: Release) -> Iterator[ExistingVolume]:
    """Yield the claims that must exist."""
    for field, part in _volumes(release):
        name = part["volume"]["existingClaim"]
        if name:
            yield ExistingVolume(f"{field}.existingClaim", name, field.startswith("checkpoints"))
    named = dict.fromkeys(release.values["apiServer"]["modelClaims"] or [], "apiServer.modelClaims")
    for name, model in release.models.items():
        if model.source.volume is not None:
            named.setdefault(model.source.volume.claim_name, f"source.volume of {name}")
    for claim, field in named.items():
        yield ExistingVolume(field, claim, is_shared=False)


def _volumes(release: Release) -> Iterator[tuple[str, Mapping[str, Any]]]:
    values = release.values
    if not values["database"]["existingSecret"]:
        yield "database.volume", values["database"]
    if values["checkpoints"]["root"].startswith("file://"):
        yield "checkpoints.volume", values["checkpoints"]
