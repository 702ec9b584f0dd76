"""The base models of a server: listing, adding and removing them (no SDK calls)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter
from pydantic import StringConstraints

from tinkercloud_api.access.effects import administers, declares, names_no_object
from tinkercloud_api.context import Caller, Server
from tinkercloud_protocol.heads.launch import HeldModels
from tinkercloud_protocol.responses.listings import BaseModelList, ListedModel, ModelRemoved
from tinkercloud_protocol.wire.json_model import Name, Storable, WireModel

router = APIRouter(prefix="/api/v1/base_models", tags=["models"])


class AddBaseModel(WireModel):
    """POST base_models."""

    name: Name
    source: Annotated[str, StringConstraints(min_length=1, max_length=4096), Storable] | None = None
    """Folder on the machine of the server, or id of a model. Default: the name."""


@router.get("")
@names_no_object
async def list_base_models(server: Server, caller: Caller) -> BaseModelList:
    """List the base models: their state, where they come from (for admins), and their runs.

    A pool lists each of its clusters. The heads of those that this server has used report the
    memory that their models take, and what is free, if they respond within two seconds. The pool
    has the sums.
    """
    models = await server.base_models.listed(caller)
    if any(model.pool is not None for model in models):
        models = with_memory(
            models, server.shared_heads.by_cluster(await server.shared_heads.shown())
        )
    return BaseModelList(base_models=models)


def with_memory(
    models: Sequence[ListedModel], by_cluster: Mapping[str, HeldModels]
) -> list[ListedModel]:
    """Return base models with the memory of the clusters of their pools, by name."""
    return [_with_memory(model, by_cluster) for model in models]


def _with_memory(model: ListedModel, by_cluster: Mapping[str, HeldModels]) -> ListedModel:
    if model.pool is None:
        return model
    clusters = [
        each.model_copy(
            update={
                "memory_bytes": sum(one.memory_bytes for one in held.models),
                "free_bytes": held.free_bytes,
            }
        )
        if (held := by_cluster.get(each.name)) is not None
        else each
        for each in model.pool.by_cluster
    ]
    sums = {
        "memory_bytes": _sum_of_known(each.memory_bytes for each in clusters),
        "free_bytes": _sum_of_known(each.free_bytes for each in clusters),
    }
    pool = model.pool.model_copy(update={"by_cluster": clusters, **sums})
    return model.model_copy(update={"pool": pool})


def _sum_of_known(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


@router.post("")
@declares(administers("base_model_add"))
@names_no_object
async def add_base_model(request: AddBaseModel, server: Server, caller: Caller) -> ListedModel:
    """Serve another base model from now on (admins; not on Kubernetes). This is idempotent."""
    caller.named_objects.add(request.name)
    await server.base_models.add(request.name, request.source or request.name)
    listed = await server.base_models.listed(caller)
    return next(model for model in listed if model.model_name == request.name)


@router.delete("/{name:path}")
@declares(administers("base_model_remove"))
@names_no_object
async def remove_base_model(name: Name, server: Server, caller: Caller) -> ModelRemoved:
    """Serve a base model without runs no longer, and free its memory (admins). Idempotent."""
    caller.named_objects.add(name)
    return await server.base_models.remove(name)
