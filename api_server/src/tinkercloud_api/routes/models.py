"""Models and sampling sessions: creating and describing them."""

import ipaddress
from pathlib import Path

import structlog
from fastapi import APIRouter, Request, Response

from tinkercloud_api.catalog.tables import SamplingSession, TrainingRun
from tinkercloud_api.context import Caller, Server
from tinkercloud_api.model_names import is_of
from tinkercloud_api.providers.base import ServedModel
from tinkercloud_protocol import futures
from tinkercloud_protocol.errors import InvalidRequest
from tinkercloud_protocol.ids import ModelId, SamplingSessionId
from tinkercloud_protocol.launch import ModelSpec
from tinkercloud_protocol.listings import (
    ModelData,
    ModelInfo,
    SamplerInfo,
    SamplingSessionAnswer,
    ServerCapabilities,
    SupportedModel,
    WeightsInfo,
)
from tinkercloud_protocol.paths import CheckpointPath
from tinkercloud_protocol.sampling import CreateSamplingSessionRequest
from tinkercloud_protocol.training import CreateModelRequest, GetInfoRequest
from tinkercloud_protocol.wire import Uri, WireModel

log = structlog.get_logger(__name__)
router = APIRouter(prefix="/api/v1", tags=["models"])


class WeightsInfoRequest(WireModel):
    """POST weights_info."""

    tinker_path: Uri


@router.get("/get_server_capabilities")
async def capabilities(server: Server, _caller: Caller) -> ServerCapabilities:
    """List the served base models."""
    return ServerCapabilities(
        supported_models=[
            SupportedModel(model_name=model.name, max_context_length=model.max_context_length)
            for model in server.provider.models()
        ]
    )


@router.post("/create_model")
async def create_model(request: CreateModelRequest, server: Server, caller: Caller) -> Response:
    """Create a training run, and start the program that trains it if RLVE is enabled."""
    rlve = request.rlve_config if request.rlve_config and request.rlve_config.enabled else None
    if rlve is not None:
        base_model = server.training_runs.served(request.base_model)
        wanted = str(ModelId(request.session_id, request.model_seq_id))
        await server.programs.check_rlve(rlve, wanted, base_model, caller)
    request_id = await server.training_runs.create(request, caller)
    log.info("training run created", request_id=request_id, base_model=request.base_model)
    model_id = request_id.rpartition(":")[0]
    if rlve is not None:
        await server.programs.run_rlve(rlve, model_id, request.base_model, caller)
    return Response(futures.promise(request_id, model_id=model_id), media_type=futures.JSON)


@router.post("/get_info", response_model_exclude_none=True)
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
async def create_sampling_session(
    request: CreateSamplingSessionRequest, server: Server, caller: Caller
) -> SamplingSessionAnswer:
    """Create a sampling session for a base model or a saved checkpoint."""
    await server.training_runs.active_session(request.session_id, caller)
    base_model, path, saved_at = request.base_model, None, None
    if request.model_path is not None:
        path = CheckpointPath.parse(request.model_path)
        manifest = await server.checkpoints.manifest(path, caller)
        if base_model is not None and not is_of(base_model, manifest.base_model):
            raise InvalidRequest(
                f"base_model: {path} was trained on {manifest.base_model!r}, not {base_model!r}"
            )
        base_model, saved_at = manifest.base_model, manifest.created_at
    assert base_model is not None  # noqa: S101 - the request model requires one of them
    base_model = server.training_runs.served(base_model).name
    session_id = SamplingSessionId(request.session_id, request.sampling_session_seq_id)
    row = await server.locator.add_sampler(
        SamplingSession(
            id=str(session_id),
            session_id=request.session_id,
            owner=caller.owner,
            base_model=base_model,
            model_path=str(path) if path else None,
            run_id=None,
            saved_at=saved_at,
        )
    )
    return SamplingSessionAnswer(sampling_session_id=row.id)


@router.get("/samplers/{sampler_id}", response_model_exclude_none=True)
async def show_sampler(sampler_id: str, server: Server, caller: Caller) -> SamplerInfo:
    """Describe the weights of a sampling session."""
    found = await server.catalog.sampler(sampler_id)
    row = caller.require(found, f"sampling session {sampler_id!r}")
    return SamplerInfo(sampler_id=row.id, base_model=row.base_model, model_path=row.model_path)


@router.post("/weights_info", response_model_exclude_none=True)
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
