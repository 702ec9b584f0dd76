"""Models and sampling sessions: creating and describing them."""

import ipaddress
from pathlib import Path

import structlog
from fastapi import APIRouter, Request, Response

from tinkercloud_api.access.effects import READS, WORKS, changes, declares, names_no_object
from tinkercloud_api.catalog.schema.tables import TrainingRun
from tinkercloud_api.context import Caller, Server
from tinkercloud_api.providers.base import ServedModel
from tinkercloud_api.web.statuses import IDEMPOTENCY_KEY
from tinkercloud_protocol.heads.launch import ModelSpec
from tinkercloud_protocol.requests.sampling_requests import (
    CreateSamplingClientRequest,
    CreateSamplingSessionRequest,
    JoinSamplingSessionRequest,
    NamedWeights,
)
from tinkercloud_protocol.requests.training_requests import CreateModelRequest, GetInfoRequest
from tinkercloud_protocol.responses.listings import (
    JoinSamplingSessionAnswer,
    ModelData,
    ModelInfo,
    SamplerInfo,
    SamplingClientAnswer,
    SamplingSessionAnswer,
    ServerCapabilities,
    SupportedModel,
    WeightsInfo,
)
from tinkercloud_protocol.wire import future_responses, routes
from tinkercloud_protocol.wire.bounds import MAX_BATCH_SIZE
from tinkercloud_protocol.wire.errors import InvalidRequest, NotFound
from tinkercloud_protocol.wire.ids import ModelId, SamplingSessionId, model_of_sampler
from tinkercloud_protocol.wire.json_model import Uri, WireModel
from tinkercloud_protocol.wire.paths import CheckpointPath

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/api/v1", tags=["models"])


FEATURES = (
    *("lora", "full_fine_tuning", "sampling", "prompt_logprobs", "custom_losses_on_the_client"),
    "custom_losses_on_the_server",
    *("checkpoints", "suspend_and_resume", "json_api"),
)
"""What `get_server_capabilities` lists."""


class WeightsInfoRequest(WireModel):
    """POST weights_info."""

    tinker_path: Uri


@router.get("/get_server_capabilities")
@names_no_object
async def capabilities(server: Server, _caller: Caller) -> ServerCapabilities:
    """List the served base models, under each of their names."""
    return ServerCapabilities(
        supported_models=[
            SupportedModel(
                model_name=name,
                max_context_length=model.max_context_length,
                reads_images=model.reads_images,
                state=server.provider.state_of(model),
            )
            for model in server.provider.models()
            for name in model.names
        ],
        max_batch_size=MAX_BATCH_SIZE,
        features=list(FEATURES),
    )


@router.post("/create_model", openapi_extra={"parameters": [IDEMPOTENCY_KEY]})
@declares(changes("model_create"))
async def create_model(
    request: CreateModelRequest, http: Request, server: Server, caller: Caller
) -> Response:
    """Create a training run, and a session for it if the request names none.

    If RLVE is enabled, a program that trains the model is started as well.
    """
    base_model = server.training_runs.served_for(request)
    rlve = request.rlve_config if request.rlve_config and request.rlve_config.enabled else None
    if rlve is not None:
        await server.programs.check_rlve(rlve, _requested_id(request), base_model, caller)
    key = http.headers.get(routes.IDEMPOTENCY_HEADER)
    request_id = await server.direct_sessions.create_model(request, caller, key)
    model_id = request_id.rpartition(":")[0]
    # Its head may still refuse it, and logs that it has created it.
    log.info("training run requested", model_id=model_id, base_model=base_model.name)
    if rlve is not None:
        await server.programs.run_rlve(rlve, model_id, base_model.name, caller)
    session_id = model_id.partition(":")[0]
    accepted = future_responses.promise(request_id, model_id=model_id, session_id=session_id)
    return Response(accepted, media_type=future_responses.JSON)


def _requested_id(request: CreateModelRequest) -> str | None:
    """Return the id of the model that a request names; None if the server chooses it."""
    if request.session_id is None or request.model_seq_id is None:
        return None
    return str(ModelId(request.session_id, request.model_seq_id))


@router.post("/get_info")
@declares(READS)
async def get_info(
    request: GetInfoRequest, http: Request, server: Server, caller: Caller
) -> ModelInfo:
    """Describe a model."""
    row = await server.catalog.run(request.model_id)
    run = caller.require(row, f"model {request.model_id!r}")
    served = {model.name: model for model in server.provider.models()}.get(run.base_model)
    return _model_info(run, served, http.client.host if http.client else "")


def _model_info(run: TrainingRun, served: ServedModel | None, client_host: str) -> ModelInfo:
    spec = ModelSpec.model_validate(run.spec)
    return ModelInfo(
        model_id=run.id,
        model_data=ModelData(
            arch=served.architecture if served else None,
            model_name=run.base_model,
            tokenizer_id=tokenizer_id(run.base_model, served, client_host),
        ),
        model_name=run.base_model,
        is_lora=spec.lora is not None,
        lora_rank=spec.lora.rank if spec.lora else None,
        optimizer_config=spec.optimizer,
    )


def tokenizer_id(name: str, served: ServedModel | None, client_host: str) -> str:
    """Return the name or path from which a client can load the tokenizer.

    A client on this machine can read the model's folder, with or without the mirror under /hf. All
    others load it by name from the mirror, if their HF_ENDPOINT refers to it, or from the public
    hub.
    """
    if served is not None and served.tokenizer is not None:
        return served.tokenizer
    path = served.local_path if served else None
    if path is not None and _is_this_machine(client_host) and Path(path).is_dir():
        return path
    return name


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@router.post("/create_sampling_session")
@declares(changes("sampler_create"))
async def create_sampling_session(
    request: CreateSamplingSessionRequest, server: Server, caller: Caller
) -> SamplingSessionAnswer:
    """Create a sampling session for a base model or a saved checkpoint."""
    named = NamedWeights(base_model=request.base_model, model_path=request.model_path)
    sampler_id = await server.sampling_sessions.create(
        request.session_id, request.sampling_session_seq_id, named, caller
    )
    return SamplingSessionAnswer(sampling_session_id=sampler_id)


@router.post("/join_sampling_session")
@declares(WORKS)
async def join_sampling_session(
    request: JoinSamplingSessionRequest, server: Server, caller: Caller
) -> JoinSamplingSessionAnswer:
    """Return the number of another client of a sampling session, which no other client has."""
    try:
        sampler_id = str(SamplingSessionId.parse(request.sampling_session_id))
    except InvalidRequest as error:
        # An id that the server has never given.
        raise NotFound(error.message) from None
    await server.locator.known.authorize_sampler(sampler_id, caller)
    return JoinSamplingSessionAnswer(client_counter=await server.sampler_clients.join(sampler_id))


@router.post("/create_sampling_client")
@declares(changes("sampler_create"))
async def create_sampling_client(
    request: CreateSamplingClientRequest, server: Server, caller: Caller
) -> SamplingClientAnswer:
    """Return a sampling session for a base model, a checkpoint or a model's current weights.

    Requests for the same weights return the same one, unless they number it.
    """
    if request.session_id is None or request.model_id is not None:
        sampler_id = await server.sampling_sessions.of(request, caller)
    else:
        sampler_id = await server.sampling_sessions.create(
            request.session_id, request.sampling_session_seq_id, request, caller
        )
    return SamplingClientAnswer(sampling_client_id=sampler_id, sampling_session_id=sampler_id)


@router.get("/samplers/{sampler_id}")
async def show_sampler(sampler_id: str, server: Server, caller: Caller) -> SamplerInfo:
    """Describe the weights of a sampling session."""
    what = f"sampling session {sampler_id!r}"
    if (model_id := model_of_sampler(sampler_id)) is not None:
        run = caller.require(await server.catalog.run(model_id), what)
        return SamplerInfo(sampler_id=sampler_id, base_model=run.base_model)
    row = caller.require(await server.catalog.sampler(sampler_id), what)
    return SamplerInfo(sampler_id=row.id, base_model=row.base_model, model_path=row.model_path)


@router.post("/weights_info")
@declares(READS)
async def weights_info(request: WeightsInfoRequest, server: Server, caller: Caller) -> WeightsInfo:
    """Describe the weights of a checkpoint."""
    path = CheckpointPath.parse(request.tinker_path)
    manifest = await server.checkpoints.manifest(path, caller)
    lora = manifest.lora
    return WeightsInfo(
        base_model=manifest.base_model,
        is_lora=lora is not None,
        lora_rank=lora.rank if lora else None,
        train_unembed=lora.train_unembed if lora else None,
        train_mlp=lora.train_mlp if lora else None,
        train_attn=lora.train_attn if lora else None,
        optimizer_config=manifest.optimizer,
    )
