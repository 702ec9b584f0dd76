"""get_tokenizer: the tokenizer of a model, for clients without an SDK."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse

from tinkercloud_api.access.effects import names_no_object
from tinkercloud_api.context import Caller, Server
from tinkercloud_api.providers.model_names import model_of
from tinkercloud_api.transfers import byte_ranges
from tinkercloud_api.web.statuses import statuses
from tinkercloud_protocol.wire.errors import NotFound
from tinkercloud_protocol.wire.future_responses import JSON

router = APIRouter(prefix="/api/v1", tags=["tokenizers"])

_FILE = "tokenizer.json"


@router.get("/get_tokenizer", responses=statuses("206", "304", "404", "416"))
@names_no_object
async def get_tokenizer(
    model_id: Annotated[str, Query(min_length=1, max_length=256)],
    request: Request,
    server: Server,
    caller: Caller,
) -> Response:
    """Return the `tokenizer.json` of the base model of a training run."""
    run = caller.require(await server.catalog.run(model_id), f"model {model_id!r}")
    served = model_of(run.base_model, server.provider.models())
    folder = served.local_path if served is not None else None
    file = Path(folder) / _FILE if folder is not None else None
    if file is None or not file.is_file():
        raise NotFound(
            f"the base model {run.base_model!r} of {model_id!r} has no {_FILE} on this server; load"
            " its tokenizer from where the model is published"
        )
    response = FileResponse(file, media_type=JSON, stat_result=file.stat())
    if byte_ranges.is_unchanged(request.headers, response.headers["etag"]):
        return Response(status_code=304, headers={"ETag": response.headers["etag"]})
    return response
