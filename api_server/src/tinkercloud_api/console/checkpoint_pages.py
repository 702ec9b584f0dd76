"""The checkpoints on the page of a run: downloading, publishing, keeping and deleting them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated

from fastapi import Request
from fastapi.responses import RedirectResponse, Response
from pydantic import AwareDatetime, BaseModel, Field

from tinkercloud_api.access.effects import changes, declares
from tinkercloud_api.console.pages import (
    OWN_FORM,
    Sent,
    Session,
    check_confirmed,
    lead_to,
    page_router,
    read,
    segment,
    show,
)
from tinkercloud_api.context import Context, Server
from tinkercloud_api.routes.checkpoints import download_routes, run_routes, surplus_routes
from tinkercloud_protocol.responses.listings import CheckpointInfo
from tinkercloud_protocol.responses.run_states import RunCheckpoint, RunDetails
from tinkercloud_protocol.wire.paths import CheckpointPath

_SHOWN = 100
"""Checkpoints of a page."""
_CHECKPOINT = "/runs/{run_id}/checkpoints/{checkpoint_id:path}"

router = page_router()


@dataclass(frozen=True, slots=True)
class ListedCheckpoints:
    """The checkpoints of a run."""

    saved: Sequence[CheckpointInfo]
    """The most recent checkpoints that clients saved, newest first."""
    total: int
    """Number of all checkpoints that clients saved."""
    steps: Mapping[str, int]
    """Step of each checkpoint by path, where known."""
    automatic: Sequence[RunCheckpoint]
    """Those of the head, newest first."""


async def listed(run: RunDetails, server: Context) -> ListedCheckpoints:
    """Return the checkpoints of a run for its page.

    Args:
        run: the run, which the caller may see; those that its head has saved are known by now.
        server: the server.
    """
    saved = list(reversed(await server.checkpoints.of_run(run.run_id)))
    paths = {each.tinker_path for each in saved}
    return ListedCheckpoints(
        saved[:_SHOWN],
        len(saved),
        {each.tinker_path: each.step for each in run.checkpoints},
        [each for each in run.checkpoints if each.tinker_path not in paths],
    )


class _Lifetime(BaseModel):
    """The fields of the form for a checkpoint's lifetime."""

    days: Annotated[int, Field(ge=1, le=3650)]


class _Kept(BaseModel):
    """The fields of the form that deletes all but the newest checkpoints."""

    keep: surplus_routes.Keep
    until: AwareDatetime


@router.get("/runs/{run_id}/surplus_checkpoints")
async def show_surplus(
    run_id: str, keep: surplus_routes.Keep, server: Server, session: Session
) -> Response:
    """Show which checkpoints of a run go if only the newest ones stay, with the form for that."""
    found = await surplus_routes.show_surplus(run_id, keep, server, session.caller)
    row = await server.catalog.run(run_id)
    return await show(
        "surplus.html",
        session=session,
        run_id=run_id,
        keep=keep,
        found=found,
        may_change=row is not None and session.caller.may_change(row),
        twin=f"runs/{segment(run_id)}/surplus_checkpoints?keep={keep}",
        command=f"tinkercloud checkpoints keep {run_id} {keep}",
    )


@router.post("/runs/{run_id}/surplus_checkpoints")
@declares(changes("checkpoint_delete"))
async def delete_surplus(run_id: str, sent: Sent, server: Server, session: Session) -> Response:
    """Delete the checkpoints of a run that were shown, and show the run again."""
    check_confirmed(sent)
    kept = read(_Kept, sent)
    await surplus_routes.delete_surplus(run_id, kept.keep, server, session.caller, kept.until)
    return _back_to(run_id)


@router.get(_CHECKPOINT + "/archive")
async def download_checkpoint(
    run_id: str, checkpoint_id: str, request: Request, server: Server, session: Session
) -> Response:
    """Redirect to the signed URL of a checkpoint as a tar file."""
    path = CheckpointPath.of_checkpoint_id(run_id, checkpoint_id)
    base_url = download_routes.base_url(request, server)
    answer = await server.downloads.archive_url(path, session.caller, base_url)
    return RedirectResponse(answer.url, HTTPStatus.SEE_OTHER, {"Cache-Control": "no-store"})


@router.post(_CHECKPOINT + "/publish", dependencies=[OWN_FORM])
@declares(changes("checkpoint_publish"))
async def publish_checkpoint(
    run_id: str, checkpoint_id: str, server: Server, session: Session
) -> Response:
    """Let everybody with an API key read a checkpoint, and show its run again."""
    await run_routes.publish(run_id, checkpoint_id, server, session.caller)
    return _back_to(run_id)


@router.post(_CHECKPOINT + "/unpublish", dependencies=[OWN_FORM])
@declares(changes("checkpoint_unpublish"))
async def unpublish_checkpoint(
    run_id: str, checkpoint_id: str, server: Server, session: Session
) -> Response:
    """Let only its owner read a checkpoint, and show its run again."""
    await run_routes.unpublish(run_id, checkpoint_id, server, session.caller)
    return _back_to(run_id)


@router.post(_CHECKPOINT + "/ttl")
@declares(changes("checkpoint_ttl_set"))
async def keep_checkpoint(
    run_id: str, checkpoint_id: str, sent: Sent, server: Server, session: Session
) -> Response:
    """Keep a checkpoint for some days, or without a limit, and show its run again."""
    seconds = None
    if sent.get("unlimited") != "yes":
        seconds = int(timedelta(days=read(_Lifetime, sent).days).total_seconds())
    wanted = run_routes.Ttl(ttl_seconds=seconds)
    await run_routes.set_ttl(run_id, checkpoint_id, wanted, server, session.caller)
    return _back_to(run_id)


@router.post(_CHECKPOINT + "/delete")
@declares(changes("checkpoint_delete"))
async def delete_checkpoint(
    run_id: str, checkpoint_id: str, sent: Sent, server: Server, session: Session
) -> Response:
    """Delete a checkpoint, and show its run again."""
    check_confirmed(sent)
    await run_routes.delete_checkpoint(run_id, checkpoint_id, server, session.caller)
    return _back_to(run_id)


def _back_to(run_id: str) -> Response:
    return lead_to(f"runs/{segment(run_id)}#checkpoints")
