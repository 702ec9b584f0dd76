"""Where the models of runs are, without waking any of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinkercloud_api.catalog.schema.tables import TrainingRun
from tinkercloud_api.checkpoints.checkpoint_lifecycle import Checkpoints
from tinkercloud_api.heads.head_locator import HeadLocator
from tinkercloud_api.heads.known_runs import placement_of
from tinkercloud_api.heads.shared_heads import SharedHeads
from tinkercloud_api.providers.base import Placement, SessionProvider
from tinkercloud_protocol.heads.journal_files import has_journal
from tinkercloud_protocol.heads.launch import HeldModel
from tinkercloud_protocol.responses.run_states import RunState
from tinkercloud_protocol.wire.errors import Unavailable

_CONCURRENT_READS = 16
_CONTINUES = "its next request continues it where it was"
_LOST = "its session head stopped without saving it"


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


@dataclass(frozen=True, slots=True)
class RunStates:
    """Finds the models of runs."""

    locator: HeadLocator
    checkpoints: Checkpoints
    provider: SessionProvider
    shared_heads: SharedHeads

    async def of(self, rows: Sequence[TrainingRun]) -> list[Whereabouts]:
        """Return where the model of each run is."""
        exists = any(row.deleted_at is None for row in rows)
        held = await self.shared_heads.models() if exists else {}
        placed = frozenset(self.provider.runs()) if exists else frozenset()
        limit = asyncio.Semaphore(_CONCURRENT_READS)

        async def find(row: TrainingRun) -> Whereabouts:
            async with limit:
                return await self._find(row, held.get(row.id), is_placed=row.id in placed)

        return await asyncio.gather(*[find(row) for row in rows])

    async def _find(
        self, row: TrainingRun, held: HeldModel | None, *, is_placed: bool
    ) -> Whereabouts:
        if row.deleted_at is not None:
            return Whereabouts("ended")
        if held is not None:
            return Whereabouts(
                "suspended" if held.is_suspended else "live",
                held.degraded,
                held.queue_state,
                held.queue_reason,
                held.step,
                held,
            )
        if row.generation is None:
            await self.locator.known.run(row.id)
            waits = self.locator.run_pending(row.id)
            return Whereabouts("waiting", waits.reason, waits.queue_state, waits.reason)
        placement = placement_of(row)
        if self.provider.has_own_head(placement):
            return Whereabouts("dedicated", self.provider.pending(placement).reason)
        try:
            return await self._unheld(row, row.generation, is_placed=is_placed)
        except Unavailable as error:
            return Whereabouts("unknown", error.message)

    async def _unheld(self, row: TrainingRun, generation: str, *, is_placed: bool) -> Whereabouts:
        """Return where the model of a run is that no head has reported."""
        if any(generation == head.generation for head in self.provider.shared_heads()):
            return Whereabouts("live", "its session head is busy, and has not said how it is doing")
        placement = placement_of(row)
        state = await self.checkpoints.suspended.find(row.id)
        if state is not None and state.continues_from(generation):
            return self._away(row.id, placement, Whereabouts("suspended", step=state.step))
        if is_placed:
            # On a cluster of a pool, whose head another API server uses.
            return Whereabouts("live", self.provider.pending(placement).reason)
        journals, unsaved = self.provider.journals(placement), self.provider.unsaved(placement)
        if (
            await asyncio.to_thread(has_journal, journals, row.id, generation)
            or await self.checkpoints.suspended.is_unsaved(row.id, generation, unsaved)
            or await self.checkpoints.journals.has(row.id, generation)
        ):
            return self._away(row.id, placement, Whereabouts("on disk", _CONTINUES))
        return Whereabouts("lost", _LOST)

    def _away(self, run_id: str, placement: Placement, idle: Whereabouts) -> Whereabouts:
        """Return what is known of a run that a head continues with its next request.

        Args:
            run_id: its id.
            placement: where it is placed.
            idle: what is known if no request waits for it.
        """
        if not self.locator.is_placing(run_id):
            return idle
        waits = self.provider.pending(placement).reason
        reason = f"{waits}; then it continues"
        return replace(idle, reason=reason, queue_state="waiting", queue_reason=waits)
