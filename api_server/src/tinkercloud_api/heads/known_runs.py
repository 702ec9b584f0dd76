"""The runs and sampling sessions of the catalog as this server has read them, and their users."""

from dataclasses import dataclass

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.claims import Claims
from tinkercloud_api.catalog.schema.tables import SamplingSession, TrainingRun
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.providers.base import Placement
from tinkercloud_api.providers.session_options import SessionOptions
from tinkercloud_protocol.heads.launch import ModelSpec, SamplerSpec
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.ids import SamplingSessionId, model_of_sampler


@dataclass(slots=True)
class KnownRun:
    """The cached part of a run's catalog row. Only the generation and the deletion change."""

    session_id: str
    placement: Placement
    spec: ModelSpec
    generation: str | None
    is_deleted: bool


@dataclass(frozen=True, slots=True)
class KnownSampler:
    """The cached part of a sampling session's catalog row."""

    session_id: str
    placement: Placement
    spec: SamplerSpec
    run_id: str | None


class KnownRuns:
    """Reads runs and sampling sessions once, and decides who may use them.

    Belongs to one event loop.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._claims = Claims(catalog)
        self.runs: dict[str, KnownRun] = {}
        """By id, those that were read. `run` reads others."""
        self.samplers: dict[str, KnownSampler] = {}
        """By id, those that were read. `sampler` reads others."""

    async def authorize_run(self, run_id: str, principal: Principal) -> bool:
        """Return whether a principal who may use a run as its request does may also change it.

        Raises:
            NotFound: the run does not exist for this principal.
            Forbidden: the principal may only read it.
        """
        run = await self.run(run_id)
        found = (
            await self._claims.of(run.placement.owner, run.session_id, principal) if run else None
        )
        used = principal.require(found, f"training run {run_id!r}")
        principal.named_objects.add(run_id)
        return principal.may_change(used)

    async def authorize_sampler(self, sampler_id: str, principal: Principal) -> bool:
        """Check that a principal may use a sampling session as its request does.

        Returns:
            Whether the principal may also change it.

        Raises:
            NotFound: the session, or its checkpoint, does not exist for this principal.
            Forbidden: the principal may only read it.
        """
        known = await self.sampler(sampler_id)
        found = (
            await self._claims.of(known.spec.owner, known.session_id, principal) if known else None
        )
        used = principal.require(found, f"sampling session {sampler_id!r}")
        if known is not None and known.spec.model_path is not None:
            await self._claims.check_source(known.spec.model_path, principal)
        return principal.may_change(used)

    async def run(self, run_id: str) -> KnownRun | None:
        """Return a run of any owner, deleted ones included; None if it does not exist."""
        run = self.runs.get(run_id)
        if run is None and (row := await self._catalog.run(run_id)) is not None:
            run = self.cache_run(row)
        return run

    def cache_run(self, row: TrainingRun) -> KnownRun:
        """Cache a run's catalog row."""
        run = KnownRun(
            row.session_id,
            placement_of(row),
            spec=ModelSpec.model_validate(row.spec),
            generation=row.generation,
            is_deleted=row.deleted_at is not None,
        )
        self.runs[row.id] = run
        return run

    async def add_sampler(self, row: SamplingSession) -> SamplingSession:
        """Record a sampling session; if it was recorded before, return the existing row.

        Raises:
            InvalidRequest: its sequence number was already used for other weights.
        """
        known = await self._catalog.add_sampler(row)
        if _weights(known) != _weights(row):
            index = SamplingSessionId.parse(row.id).index
            raise InvalidRequest(
                f"sampling_session_seq_id: {index} was already used in this session for other"
                " weights; use the next unused number"
            )
        self._cache_sampler(known)
        return known

    async def sampler(self, sampler_id: str) -> KnownSampler | None:
        """Return a sampling session of any owner; None if it does not exist."""
        sampler = self.samplers.get(sampler_id)
        if sampler is None and (run_id := model_of_sampler(sampler_id)) is not None:
            # The session of a run's current weights exists as long as the run, without a row.
            if (run := await self.run(run_id)) is None:
                return None
            spec = SamplerSpec(owner=run.placement.owner)
            sampler = KnownSampler(run.session_id, run.placement, spec, run_id)
            self.samplers[sampler_id] = sampler
        if sampler is None and (row := await self._catalog.sampler(sampler_id)) is not None:
            sampler = self._cache_sampler(row)
        return sampler

    def _cache_sampler(self, row: SamplingSession) -> KnownSampler:
        sampler = KnownSampler(
            row.session_id,
            Placement(row.run_id or row.id, row.owner, row.base_model),
            SamplerSpec(owner=row.owner, model_path=row.model_path, saved_at=row.saved_at),
            row.run_id,
        )
        self.samplers[row.id] = sampler
        return sampler

    async def run_of_sampler(self, sampler_id: str) -> str | None:
        """Return the run whose unsaved weights a sampling session uses, or None if it uses none."""
        sampler = await self.sampler(sampler_id)
        return sampler.run_id if sampler is not None else None

    async def can_sample_again(self, sampler_id: str) -> bool:
        """Whether a sampling request whose result is gone can simply be executed again."""
        sampler = await self.sampler(sampler_id)
        return sampler is not None and sampler.run_id is None


def placement_of(row: TrainingRun) -> Placement:
    """Return the placement of a run, which any replica can derive from the catalog."""
    return Placement(
        row.id,
        row.owner,
        row.base_model,
        ModelSpec.model_validate(row.spec),
        SessionOptions.read(row.user_metadata or {}),
    )


def _weights(row: SamplingSession) -> tuple[str, str | None, str | None]:
    """Return the fields of a sampling session that identify its weights."""
    return row.base_model, row.model_path, row.run_id
