"""Shows, saves and stops runs on behalf of people who are not their client."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import structlog

from tinkercloud_api.catalog.schema.tables import TrainingRun
from tinkercloud_api.heads.run_states import RunStates, Whereabouts
from tinkercloud_api.providers.base import HeadEndpoint
from tinkercloud_api.runs.training_runs import TrainingRuns
from tinkercloud_protocol.heads.head_messages import ModelSaved, ModelSuspended, SaveModel
from tinkercloud_protocol.heads.launch import ModelSpec, Saved
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound, StateLost, Unavailable
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

log = structlog.get_logger(__name__)

_SAVE_SECONDS = 600.0
"""A head responds only after it has written the whole model."""
_UNNAMED = "unnamed"
"""Placeholder for the name that a head chooses."""
_INTERRUPTED_SECONDS = 45.0
"""How long an interrupted client, which wants to exit, waits for its runs to be saved."""
_LAST = "/last-step-"
"""Part of the paths of checkpoints that heads write instead of automatic ones."""
_KEPT = timedelta(days=7)
"""How long the last checkpoint of an interrupted client is kept."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Shows, saves and stops runs, after the caller's right to them was checked."""

    states: RunStates
    training_runs: TrainingRuns
    _saves: "dict[str, tuple[int | None, asyncio.Task[None]]]" = field(default_factory=dict)
    """Saves of runs whose clients were interrupted, with the step, until their session ends."""

    async def save(
        self, run_id: str, endpoint: HeadEndpoint, name: str | None, limit: int | None
    ) -> ModelSaved:
        """Write a checkpoint of a run's state after its last optim_step, without a gradient.

        Args:
            run_id: the run.
            endpoint: its head.
            name: name of the checkpoint; None means one with the number of the step.
            limit: maximum bytes of all checkpoints of one owner; None means no limit.

        Raises:
            InvalidRequest: the name is in use or not allowed, or the owner's storage is full.
            Unavailable: the head did not respond, or can't write now.
        """
        path = CheckpointPath(run_id, CheckpointKind.TRAINING, name or _UNNAMED)
        await self.states.checkpoints.check_quota(path, limit)
        body = SaveModel(name=name).model_dump_json()
        target = f"{routes.HEAD_SAVE_MODEL}/{run_id}"
        answer = await self.states.locator.calls.post(endpoint, target, body, _SAVE_SECONDS)
        saved = ModelSaved.model_validate_json(answer)
        await self._index(saved.tinker_path)
        return saved

    async def is_away(self, run_id: str) -> bool:
        """Whether no head has a run in memory, but its next request resumes it."""
        row = await self.training_runs.catalog.run(run_id)
        places = await self.states.of([row]) if row is not None else []
        return any(place.state in {"suspended", "on disk"} for place in places)

    async def suspend(self, run_id: str, endpoint: HeadEndpoint) -> None:
        """Write a run to the store and free its memory, until its next request.

        Raises:
            InvalidRequest: a request of the run is running or waits.
            Unavailable: the head did not respond.
        """
        target = f"{routes.HEAD_SUSPEND_MODEL}/{run_id}"
        answer = await self.states.locator.calls.post(endpoint, target, "", _SAVE_SECONDS)
        if not ModelSuspended.model_validate_json(answer).is_suspended:
            raise InvalidRequest(
                f"suspend: training run {run_id} is in use, and its next request would resume it;"
                " stop its client first, or end the run: without suspend"
            )

    async def end(
        self, run_id: str, endpoint: HeadEndpoint | None, limit: int | None, stopped_by: str
    ) -> str | None:
        """Save a run, then delete it. This is idempotent.

        Args:
            run_id: the run.
            endpoint: its head; None if no head has its model, nor can have it again.
            limit: maximum bytes of all checkpoints of one owner; None means no limit.
            stopped_by: who stops it, as `TrainingRun.stopped_by`.

        Returns:
            The path of its last checkpoint; None if there was nothing to save.

        Raises:
            InvalidRequest: the owner's storage is full; the run continues.
            Unavailable: it could not be saved, and continues.
        """
        path = None
        if endpoint is not None:
            # Of a run whose state is lost, its checkpoints are left.
            with suppress(StateLost):
                path = await self._save_last(run_id, endpoint, limit)
        await self.training_runs.unload(run_id, stopped_by)
        return path

    async def _save_last(
        self, run_id: str, endpoint: HeadEndpoint, limit: int | None
    ) -> str | None:
        """Write the last checkpoint of a run; return its path, None if it never took a step.

        Raises:
            InvalidRequest: the owner's storage is full, and the run has no last checkpoint yet.
            StateLost: the head has lost its state.
            Unavailable: it could not be saved now.
        """
        checkpoints = self.states.checkpoints
        row = await self.training_runs.catalog.run(run_id)
        if row is None:
            return None
        if not any(_LAST in each.tinker_path for each in await checkpoints.of_run(run_id)):
            try:
                await checkpoints.check_room(row.owner, 1, limit)
            except InvalidRequest as error:
                raise InvalidRequest(
                    f"{error.message}. To free the memory of the run without a checkpoint, suspend"
                    f" it: tinkercloud runs stop {run_id} --suspend"
                ) from None
        target = f"{routes.HEAD_CHECKPOINT}/{run_id}"
        saved = Saved.model_validate_json(
            await self.states.locator.calls.post(endpoint, target, "", _SAVE_SECONDS)
        )
        for written in saved.checkpoints:
            await self._index(written)
            return written
        # A head also leaves out models that could not be created.
        (place,) = await self.states.of([row])
        if _is_worth_saving(place):
            raise Unavailable(
                f"training run {run_id} was suspended or moved meanwhile; send the request again"
            )
        return None

    async def _index(self, path: str) -> None:
        """List a checkpoint that a head has just written, perhaps in place of an earlier one."""
        index = self.states.checkpoints.index
        manifest = await index.read(CheckpointPath.parse(path))
        if manifest is not None:
            await index.update(manifest)

    async def save_interrupted(
        self, runs: Sequence[TrainingRun], moment: datetime, limit: int | None
    ) -> None:
        """Save the runs of a client that was interrupted, for a week, before they are deleted.

        Left out are whole models, whose checkpoints are large, runs without a step, and runs whose
        owner's storage is full. A head that serves a single run saves it by itself.

        Args:
            runs: all runs of its session.
            moment: the time.
            limit: maximum bytes of all checkpoints of one owner; None means no limit.

        Raises:
            Unavailable: one could not be saved now. Nothing may be deleted then; the call can be
                repeated.
        """
        loras = [run for run in runs if ModelSpec.model_validate(run.spec).lora is not None]
        places = zip(loras, await self.states.of(loras), strict=True)
        saves = [
            self._saving_task(run.id, place.step, moment, limit)
            for run, place in places
            if _is_worth_saving(place)
        ]
        if not saves:
            return
        done, pending = await asyncio.wait(saves, timeout=_INTERRUPTED_SECONDS)
        if pending:
            raise Unavailable(
                f"{len(pending)} runs are still being saved, after {_INTERRUPTED_SECONDS:.0f} s;"
                " send the request again"
            )
        for task in done:
            task.result()
        for run in loras:
            self._saves.pop(run.id, None)

    def _saving_task(
        self, run_id: str, step: int | None, moment: datetime, limit: int | None
    ) -> "asyncio.Task[None]":
        """Return the task that saves a run at a step, also for a request that is repeated."""
        known = self._saves.get(run_id)
        if known is not None and (not known[1].done() or (step is not None and known[0] == step)):
            return known[1]
        task = asyncio.create_task(self._save_for_a_week(run_id, moment, limit))
        self._saves[run_id] = step, task
        task.add_done_callback(lambda _: self._forget_failed(run_id, task))
        return task

    def _forget_failed(self, run_id: str, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or task.exception() is not None:
            self._saves.pop(run_id, None)

    async def _save_for_a_week(self, run_id: str, moment: datetime, limit: int | None) -> None:
        try:
            endpoint = await self.states.locator.head_of_run(run_id)
            path = await self._save_last(run_id, endpoint, limit)
            if path is not None:
                await self.states.checkpoints.expire_at(CheckpointPath.parse(path), moment + _KEPT)
        except (InvalidRequest, NotFound, StateLost) as error:
            log.warning("no last checkpoint of a run", run_id=run_id, reason=error.message)


def _is_worth_saving(place: Whereabouts) -> bool:
    """Whether a run has steps that only its head or its suspended state has.

    Raises:
        Unavailable: this cannot be determined now.
    """
    if place.state == "unknown":
        raise Unavailable(place.reason or "the state of a run cannot be read; send it again")
    return place.state in {"live", "suspended", "on disk"} and place.step != 0
