"""Runs whose journals are on the disk of a head that has not continued them.

A head that replaces a killed one on the same disk continues a run when an API server asks for it.
Some runs nobody asks for before the head stops, saves or gives runs away. They are continued then,
so that they are saved like the runs in memory: the disk may be deleted with the head's pod.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from tinkercloud_protocol.heads.journal_files import JournalManifest
from tinkercloud_protocol.wire.errors import (
    InvalidRequest,
    NotFound,
    StateLost,
    Unavailable,
    WireError,
)
from tinkercloud_worker.checkpoints.store import CheckpointStore
from tinkercloud_worker.head.durable.durable_runs import Durability
from tinkercloud_worker.head.model.model_registry import ModelRegistry
from tinkercloud_worker.head.wire.failed_results import Moved, error_message, to_result

log = structlog.get_logger(__name__)

_FOR_GOOD = (InvalidRequest, StateLost, Moved)
"""Failures of an attempt to continue a run that every further attempt would meet."""


class KeptRuns:
    """Finds these runs, and continues them. Belongs to one event loop."""

    def __init__(
        self,
        durability: Durability,
        store: CheckpointStore,
        models: ModelRegistry,
        resume: Callable[[JournalManifest], Awaitable[None]],
    ) -> None:
        """Continue nothing yet.

        Args:
            durability: the journals of the head.
            store: the checkpoint store.
            models: the models of the head.
            resume: continues a run from its journal.
        """
        self._durability = durability
        self._store = store
        self._models = models
        self._resume = resume

    async def waiting(self, only: str = "") -> list[JournalManifest]:
        """Return the manifests of the runs that the head has not continued.

        Args:
            only: the id of one run; otherwise all runs are considered.

        Raises:
            Unavailable: the disk can't be read.
        """
        if only and not self._is_waiting(only):
            return []
        try:
            found = await asyncio.to_thread(self._durability.kept.on_disk, only)
        except OSError as error:
            raise Unavailable(
                f"whether there are more runs on the local disk can't be determined: it can't be"
                f" read ({error})"
            ) from None
        return [each for each in found if self._is_waiting(each.run_id)]

    def _is_waiting(self, name: str) -> bool:
        return self._models.state(name).may_be_kept

    async def load(self, manifest: JournalManifest) -> WireError | None:
        """Continue a run, unless its state is in the store or another head has it.

        Returns:
            Why it can't be continued now. None if it is in memory, or if nothing of it can be
            saved; the log has the reason then.
        """
        name = manifest.run_id
        try:
            is_saved = await self._is_saved(manifest)
            if is_saved and self._is_waiting(name):
                # It would take room on the disk until the head ends.
                await self._durability.drop(name)
            elif self._is_waiting(name):
                await self._resume(manifest)
        except NotFound:
            log.info("a run on the disk was deleted", model_id=name)
        except _FOR_GOOD as error:
            log.error(  # noqa: TRY400 - nothing is wrong here
                "a run on the disk can't be continued, and is not saved",
                model_id=name,
                reason=error.message,
            )
        except WireError as error:
            log.warning("a run can't be continued now", model_id=name, reason=error.message)
            return error
        except Exception as error:  # noqa: BLE001 - the other runs are saved all the same
            return Unavailable(error_message(to_result(error)))
        return None

    async def _is_saved(self, manifest: JournalManifest) -> bool:
        """Return whether a later state than the local journal's is elsewhere."""
        stored = await self._store.find_suspended(manifest.run_id)
        if stored is not None and stored.continues_from(manifest.generations[-1]):
            return True
        return await self._durability.kept.is_replaced(manifest)

    async def load_all(self, only: str = "") -> WireError | None:
        """Continue all of these runs, or one; return the first reason why one can't be now.

        Raises:
            Unavailable: the disk can't be read.
        """
        failures = [await self.load(manifest) for manifest in await self.waiting(only)]
        return next((each for each in failures if each is not None), None)

    async def repeat(self, only: str = "") -> WireError | None:
        """Continue these runs as `load_all`; return once their requests are repeated."""
        kept = await self.waiting(only)
        failures = [await self.load(manifest) for manifest in kept]
        for manifest in kept:
            if (model := self._models.in_memory.get(manifest.run_id)) is not None:
                await model.queue.idle()
        return next((each for each in failures if each is not None), None)
