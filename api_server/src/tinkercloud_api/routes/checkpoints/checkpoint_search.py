"""Search for checkpoints, as in the public documentation of SDK 0.39.

The fields of request and response are documented there; the path is not, and follows the one of the
session search.
"""

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import AwareDatetime, Field

from tinkercloud_api.access.auth import Principal
from tinkercloud_api.access.effects import READS, declares
from tinkercloud_api.catalog.runs.indexed_checkpoints import CheckpointSearch
from tinkercloud_api.context import Caller, Server
from tinkercloud_protocol.responses.listings import CheckpointSearchAnswer, CheckpointSearchPosition
from tinkercloud_protocol.wire.errors import InvalidRequest
from tinkercloud_protocol.wire.json_model import Items, Name, Uri, UserMetadata, WireModel
from tinkercloud_protocol.wire.paths import CheckpointKind, CheckpointPath

router = APIRouter(prefix="/api/v1", tags=["training runs"])

Names = Annotated[Items[Name], Field(max_length=100)]
_KINDS = {kind.checkpoint_type: kind for kind in CheckpointKind}


class SearchOwner(WireModel):
    """Whose checkpoints to search."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[Items[Name], Field(max_length=10)] = Field(default_factory=list)
    """Names of owners, for type `user`."""


class SearchPosition(WireModel):
    """The last checkpoint of the previous page: `next_cursor` of its response."""

    # JSON has no times: the text of one is accepted in spite of strict types.
    last_created_at: Annotated[AwareDatetime, Field(strict=False)]
    last_checkpoint_uuid: Uri


class SearchCheckpoints(WireModel):
    """POST checkpoints/search."""

    project_ids: Names | None = None
    user_metadata: UserMetadata = Field(default_factory=dict)
    checkpoint_type: Literal["training", "sampler", "external"] | None = None
    owner: SearchOwner = SearchOwner()
    base_models: Names | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchPosition | None = None


@router.post("/checkpoints/search")
@declares(READS)
async def search_checkpoints(
    request: SearchCheckpoints, server: Server, caller: Caller
) -> CheckpointSearchAnswer:
    """Search checkpoints, newest first."""
    after, cursor = None, request.cursor
    if cursor is not None:
        after = (cursor.last_created_at, CheckpointPath.parse(cursor.last_checkpoint_uuid))
    for project_id in request.project_ids or ():
        await server.projects.require(project_id, caller)
    wanted = CheckpointSearch(
        visible=caller.visible("owned" if request.owner.type == "own" else "accessible"),
        owners=_owners(request.owner, caller),
        project_ids=request.project_ids,
        user_metadata=request.user_metadata,
        kind=None if request.checkpoint_type is None else _KINDS[request.checkpoint_type],
        base_models=request.base_models,
        after=after,
        limit=request.limit,
    )
    found = await server.checkpoints.search(wanted)
    if len(found) < request.limit:
        return CheckpointSearchAnswer(checkpoints=found)
    position = CheckpointSearchPosition(
        last_created_at=found[-1].time, last_checkpoint_uuid=found[-1].tinker_path
    )
    return CheckpointSearchAnswer(checkpoints=found, next_cursor=position)


def _owners(owner: SearchOwner, caller: Principal) -> list[str] | None:
    """Return the owners whose checkpoints are searched; None means all that are visible.

    Raises:
        InvalidRequest: an owner is named whose objects the caller cannot see.
    """
    if owner.type != "user":
        return None
    names = [] if caller.projects else owner.owner_urns
    hidden = [name for name in names if not caller.may_see(name)]
    if hidden or not owner.owner_urns:
        raise InvalidRequest(
            "owner.owner_urns: expected 1 to 10 owners whose objects this key may see, got"
            f" {owner.owner_urns[:3]}"
        )
    return list(owner.owner_urns)
