"""Where the models of runs are, without waking any of them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tinkercloud_api.catalog.runs.run_search import Heads, RunSearch
from tinkercloud_api.catalog.schema.statements import Page
from tinkercloud_api.catalog.schema.tables import TrainingRun
from tinkercloud_api.catalog.store import Catalog
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.heads.head_locator import HeadLocator
from tinkercloud_api.heads.known_runs import placement_of
from tinkercloud_api.heads.shared_heads import SharedHeads
from tinkercloud_api.providers.base import HeadEnd, Placement, SessionProvider
from tinkercloud_protocol.heads.journal_files import has_journal
from tinkercloud_protocol.heads.launch import HeldModel
from tinkercloud_protocol.responses.run_states import RunState, RunStatus
from tinkercloud_protocol.wire.errors import Unavailable

_CONCURRENT_READS = 16
_READ_SECONDS = 10.0
"""How long the store and its disk are asked for a run that no head has. Once one has not responded
in time, the other runs of the same list are not asked for."""
_MOST_OF_HEADS, _MOST_READ = 500, 100
_HAS_ENDED: Mapping[str, bool] = {"open": False, "ended": True}
"""The statuses that the catalog knows."""
_OF_HEADS = {"live", "running", "idle", "waiting", "dedicated"}
"""The statuses that only runs can have which a head has, or is to create."""
HEAD_IS_SILENT = "its session head is busy, and has not said how it is doing"
"""Why nothing is known of a run whose head does not respond."""
_CONTINUES = "its next request continues it where it was"
_LOST = "its session head stopped without saving it"
_UNASKED = "no request waits for it on this server: it starts only if its client asks again"
_TOO_SLOW = f"the store or the disk that would have it has not responded within {_READ_SECONDS:g} s"


def most_searched(status: RunStatus) -> int:
    """Return of how many runs, the last used ones, those with a status are found.

    They are fewer for statuses for which the store or a disk is asked for each run.
    """
    return _MOST_OF_HEADS if status in _OF_HEADS else _MOST_READ


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where the model of a run is."""

    state: RunState
    reason: str | None = None
    queue_state: str = "idle"
    queue_reason: str | None = None
    step: int | None = None
    held: HeldModel | None = None
    """What its head says; None if no shared head has the model."""
    has_run: bool = True
    """Whether its head ever ran; known of runs that are ending."""

    def has(self, status: RunStatus) -> bool:
        """Return whether a search for a status finds the run."""
        if status == "waiting":
            return self.state == "waiting" or self.queue_state not in {"idle", "running"}
        if status in {"running", "idle"}:
            in_memory = self.state == "live" and self.held is not None
            return in_memory and self.queue_state == status
        return self.state == status


@dataclass(frozen=True, slots=True)
class RunStates:
    """Finds the models of runs."""

    catalog: Catalog
    locator: HeadLocator
    checkpoints: Checkpoints
    provider: SessionProvider
    shared_heads: SharedHeads

    async def search(
        self,
        wanted: RunSearch,
        status: RunStatus | None,
        page: Page,
        held: Mapping[str, HeldModel] | None = None,
    ) -> tuple[list[tuple[TrainingRun, Whereabouts]], int]:
        """Return the runs of a search that have a status, with their state, and their total number.

        Of the statuses that the catalog does not know, it finds those of the `most_searched` runs
        that were used last. Runs of a head that does not respond are `live`, as no request of
        theirs is known to wait; those that no head has are `unknown` while the store or their disk
        does not respond.

        Args:
            wanted: what the runs have in common otherwise.
            status: their status; None for any.
            page: page to return, the last used first, and ended ones last.
            held: the models of the heads, by id; None to ask the heads.
        """
        if status is None or status in _HAS_ENDED:
            has_ended = None if status is None else _HAS_ENDED[status]
            rows, total = await self.catalog.runs_by_use(replace(wanted, has_ended=has_ended), page)
            return list(zip(rows, await self.of(rows, held), strict=True)), total
        heads = self._heads() if status in _OF_HEADS else None
        candidates = replace(wanted, has_ended=False, heads=heads)
        rows, _ = await self.catalog.runs_by_use(candidates, Page(0, most_searched(status)))
        places = await self.of(rows, held)
        found = [each for each in zip(rows, places, strict=True) if each[1].has(status)]
        return found[page.offset : page.offset + page.limit], len(found)

    def _heads(self) -> Heads:
        generations = {head.generation for head in self.provider.shared_heads()}
        return Heads(generations, {*self.provider.runs(), *self.locator.placing})

    async def of(
        self, rows: Sequence[TrainingRun], known: Mapping[str, HeldModel] | None = None
    ) -> list[Whereabouts]:
        """Return where the model of each run is; `known` are the models of heads, as in search."""
        exists = any(row.deleted_at is None for row in rows)
        held = known or {}
        if known is None and exists:
            held = await self.shared_heads.models()
        placed = frozenset(self.provider.runs()) if exists else frozenset()
        limit = asyncio.Semaphore(_CONCURRENT_READS)
        stalled = asyncio.Event()

        async def find(row: TrainingRun) -> Whereabouts:
            end = self.provider.end_of(placement_of(row)) if row.deleted_at is None else None
            if end is not None:
                return self._ending(row.id, end, held.get(row.id))
            async with limit:
                return await self._find(row, held.get(row.id), stalled, is_placed=row.id in placed)

        return await asyncio.gather(*[find(row) for row in rows])

    def _ending(self, run_id: str, end: HeadEnd, held: HeldModel | None) -> Whereabouts:
        waits = run_id in self.locator.placing
        return Whereabouts(
            "lost" if end.is_over else "ending",
            end.reason,
            "waiting" if waits else "idle",
            end.reason if waits else None,
            held.step if held is not None else None,
            None if end.is_over else held,
            has_run=end.has_run,
        )

    async def _find(
        self, row: TrainingRun, held: HeldModel | None, stalled: asyncio.Event, *, is_placed: bool
    ) -> Whereabouts:
        if row.deleted_at is not None:
            return Whereabouts("ended")
        if held is not None:
            idle = _CONTINUES if held.is_suspended else None
            return Whereabouts(
                "suspended" if held.is_suspended else "live",
                held.degraded or idle,
                held.queue_state,
                held.queue_reason,
                held.step,
                held,
            )
        if row.generation is None:
            return await self._uncreated(row, is_placed=is_placed)
        placement = placement_of(row)
        if self.provider.has_own_head(placement):
            return self._placed("dedicated", placement)
        if stalled.is_set():
            return Whereabouts("unknown", _TOO_SLOW)
        try:
            async with asyncio.timeout(_READ_SECONDS):
                return await self._unheld(row, row.generation, is_placed=is_placed)
        except Unavailable as error:
            return Whereabouts("unknown", error.message)
        except TimeoutError:
            stalled.set()
            return Whereabouts("unknown", _TOO_SLOW)

    async def _uncreated(self, row: TrainingRun, *, is_placed: bool) -> Whereabouts:
        """Return what is known of a run whose model has not been created."""
        if is_placed or row.id in self.locator.placing:
            await self.locator.known.run(row.id)
            waits = self.locator.run_pending(row.id)
            return Whereabouts("waiting", waits.reason, waits.queue_state, waits.reason)
        # No request has asked for it since this server has started.
        limit = await self.locator.limit_of(row.id, row.owner)
        if limit is None:
            return Whereabouts("waiting", _UNASKED, "waiting", _UNASKED)
        reason = f"{limit}; {_UNASKED}"
        return Whereabouts("waiting", reason, "paused_capacity", reason)

    async def _unheld(self, row: TrainingRun, generation: str, *, is_placed: bool) -> Whereabouts:
        """Return where the model of a run is that no head has reported."""
        if any(generation == head.generation for head in self.provider.shared_heads()):
            return Whereabouts("live", HEAD_IS_SILENT)
        placement = placement_of(row)
        state = await self.checkpoints.suspended.find(row.id)
        if state is not None and state.continues_from(generation):
            return self._away(
                row.id, placement, Whereabouts("suspended", _CONTINUES, step=state.step)
            )
        if is_placed:
            # On a cluster of a pool, whose head another API server uses.
            return self._placed("live", placement)
        journals, unsaved = self.provider.journals(placement), self.provider.unsaved(placement)
        if (
            await asyncio.to_thread(has_journal, journals, row.id, generation)
            or await self.checkpoints.suspended.is_unsaved(row.id, generation, unsaved)
            or await self.checkpoints.journals.has(row.id, generation)
        ):
            return self._away(row.id, placement, Whereabouts("on disk", _CONTINUES))
        return Whereabouts("lost", _LOST)

    def _placed(self, state: RunState, placement: Placement) -> Whereabouts:
        """Return what is known of a run with a place on a head that says nothing to this server."""
        waits = self.provider.pending(placement).reason
        if placement.target not in self.locator.placing:
            return Whereabouts(state, waits)
        return Whereabouts(state, waits, "waiting", waits)

    def _away(self, run_id: str, placement: Placement, idle: Whereabouts) -> Whereabouts:
        """Return what is known of a run that a head continues with its next request.

        Args:
            run_id: its id.
            placement: where it is placed.
            idle: what is known if no request waits for it.
        """
        if run_id not in self.locator.placing:
            return idle
        waits = self.provider.pending(placement).reason
        reason = f"{waits}; then it continues"
        return replace(idle, reason=reason, queue_state="waiting", queue_reason=waits)
