"""Shows, saves and stops runs on behalf of people who are not their client."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tinkercloud_api.catalog.schema.tables import TrainingRun
from tinkercloud_api.heads.run_states import RunStates
from tinkercloud_api.providers.base import HeadEndpoint
from tinkercloud_api.runs.training_runs import TrainingRuns
from tinkercloud_protocol.heads.head_messages import ModelSaved, ModelSuspended, SaveModel
from tinkercloud_protocol.heads.launch import ModelSpec, Saved
from tinkercloud_protocol.wire import routes
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

_SAVE_SECONDS = 600.0
"""A head responds only after it has written the whole model."""
_UNNAMED = "unnamed"
"""Placeholder for the name that a head chooses."""
_KEPT = timedelta(days=7)
"""How long the last checkpoint of an interrupted client is kept."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Shows, saves and stops runs, after the caller's right to them was checked."""

    states: RunStates
    training_runs: TrainingRuns

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
                " stop its client first, or end the run (suspend: false)"
            )

    async def end(self, run_id: str, endpoint: HeadEndpoint | None) -> str | None:
        """Save a run, then delete it. This is idempotent.

        Args:
            run_id: the run.
            endpoint: its head; None if no head has its model, nor can have it again.

        Returns:
            The path of its last checkpoint; None without a head.

        Raises:
            Unavailable: it could not be saved, and continues.
        """
        path = None if endpoint is None else await self._save_last(run_id, endpoint)
        await self.training_runs.unload(run_id)
        return path

    async def _save_last(self, run_id: str, endpoint: HeadEndpoint) -> str | None:
        target = f"{routes.HEAD_CHECKPOINT}/{run_id}"
        saved = Saved.model_validate_json(
            await self.states.locator.calls.post(endpoint, target, "", _SAVE_SECONDS)
        )
        path = next(iter(saved.checkpoints), None)
        if path is not None:
            await self._index(path)
        return path

    async def _index(self, path: str) -> None:
        """List a checkpoint that a head has just written, perhaps in place of an earlier one."""
        index = self.states.checkpoints.index
        manifest = await index.read(CheckpointPath.parse(path))
        if manifest is not None:
            await index.update(manifest)

    async def save_interrupted(self, runs: Sequence[TrainingRun], moment: datetime) -> None:
        """Save the runs of a client that was interrupted, for a week, before they are deleted.

        Left out are whole models, whose checkpoints are large, and runs without a step. The heads
        of other runs save them by themselves (`SessionProvider.shared_heads`).

        Raises:
            Unavailable: one could not be saved; nothing is deleted then, and the client repeats.
        """
        left = [run for run in runs if run.deleted_at is None]
        held = await self.states.shared_heads.models() if left else {}
        for run in left:
            model = held.get(run.id)
            is_whole = ModelSpec.model_validate(run.spec).lora is None
            if model is None or not model.step or is_whole:
                continue
            path = await self._save_last(run.id, await self.states.locator.head_of_run(run.id))
            if path is not None:
                await self.states.checkpoints.expire_at(CheckpointPath.parse(path), moment + _KEPT)
