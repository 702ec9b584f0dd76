"""What a server remembers of the catalog rows of runs and sampling sessions."""

from dataclasses import dataclass

from tinkercloud_api.providers.base import Placement
from tinkercloud_protocol.heads.launch import ModelSpec, SamplerSpec


@dataclass(slots=True)
class KnownRun:
    """The cached part of a run's catalog row. Only the generation and the deletion change."""

    owner: str
    session_id: str
    placement: Placement
    spec: ModelSpec
    generation: str | None
    is_deleted: bool


@dataclass(frozen=True, slots=True)
class KnownSampler:
    """The cached part of a sampling session's catalog row."""

    owner: str
    session_id: str
    placement: Placement
    spec: SamplerSpec
    run_id: str | None
