"""The text of samples of a run, which is kept only if its owner wants it (no SDK calls)."""

from typing import Annotated

from fastapi import APIRouter, Query

from tinkercloud_api.access.effects import changes, declares
from tinkercloud_api.catalog.runs.sample_texts import MAX_STEPS
from tinkercloud_api.catalog.schema.tables import SampleText, now
from tinkercloud_api.context import Caller, Server
from tinkercloud_protocol.heads.reports.kept_samples import SAMPLES_PER_STEP
from tinkercloud_protocol.responses.run_states import RunSample, RunSamples
from tinkercloud_protocol.wire.errors import Forbidden
from tinkercloud_protocol.wire.json_model import WireModel

router = APIRouter(prefix="/api/v1", tags=["runs"])


MAX_SAMPLES = MAX_STEPS * SAMPLES_PER_STEP
"""Samples of a run."""


class KeepSamples(WireModel):
    """PUT runs/{id}/samples."""

    keep: bool
    """Whether the text of some samples is kept from now on."""


@router.get("/runs/{run_id}/samples")
async def show_samples(
    run_id: str,
    server: Server,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=MAX_SAMPLES)] = 20,
) -> RunSamples:
    """Return the newest prompts and answers of a run that were kept, and whether others will be."""
    row = caller.require(await server.catalog.run(run_id), f"training run {run_id!r}")
    samples = await server.samples.of_run(row.id, limit)
    return RunSamples(
        run_id=row.id,
        keep=row.keeps_samples_since is not None,
        samples=[_sample(each) for each in samples],
    )


@router.put("/runs/{run_id}/samples")
@declares(changes("run_samples_keep"))
async def keep_samples(
    run_id: str, request: KeepSamples, server: Server, caller: Caller
) -> dict[str, str]:
    """Keep the text of some samples of a run from now on, or of no further ones."""
    await server.locator.known.authorize_run(run_id, caller)
    row = await server.catalog.run(run_id)
    if request.keep and row is not None and not caller.works_on(row):
        raise Forbidden(
            f"training run {run_id!r} belongs to {row.owner!r}: only its owner, and members of its"
            " project, let the text of its samples be kept"
        )
    # For the audit log, as its path does not say which.
    caller.named_objects.add("on" if request.keep else "off")
    if request.keep:
        await server.samples.keep(run_id, now())
    else:
        await server.samples.stop(run_id)
    server.sampled_runs.changed()
    return {}


@router.delete("/runs/{run_id}/samples")
@declares(changes("run_samples_delete"))
async def delete_samples(run_id: str, server: Server, caller: Caller) -> dict[str, str]:
    """Delete the prompts and answers of a run that were kept, and keep no further ones."""
    await server.locator.known.authorize_run(run_id, caller)
    await server.samples.delete(run_id)
    server.sampled_runs.changed()
    return {}


def _sample(row: SampleText) -> RunSample:
    return RunSample(
        step=row.step,
        time=row.at,
        prompt=row.prompt,
        prompt_tokens_left_out=row.prompt_tokens_left_out,
        answer=row.answer,
        answer_tokens_left_out=row.answer_tokens_left_out,
    )
