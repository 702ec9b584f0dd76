"""A model while it lives in a head: its specification, what its requests do, and their order."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from tinkercloud_protocol.ids import ModelId
from tinkercloud_protocol.launch import ModelSpec
from tinkercloud_protocol.tensors import ForwardBackwardRequest
from tinkercloud_protocol.training import (
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkercloud_worker.head.backend import Backend
from tinkercloud_worker.head.operations import Operations
from tinkercloud_worker.head.queue import ModelQueue, Operation, Origin, Role
from tinkercloud_worker.head.requests import OrderedRequest
from tinkercloud_worker.head.results import Results
from tinkercloud_worker.head.samplers import Samplers


@dataclass(slots=True, eq=False)
class LiveModel:
    """A model and its queue."""

    model_id: ModelId
    spec: ModelSpec
    operations: Operations
    queue: ModelQueue
    lineage: list[str]
    """Generations of the heads it was suspended by, oldest first."""

    def operation(self, request: OrderedRequest, origin: Origin) -> Operation:
        """Return what a request does when it is its turn."""
        operations, role = self.operations, role_of(request)
        match request:
            case ForwardBackwardRequest():
                return Operation(
                    lambda: operations.forward_backward(request),
                    role,
                    origin,
                    has_large_result=True,
                )
            case OptimStepRequest():
                return Operation(lambda: operations.optim_step(request), role, origin)
            case SaveWeightsRequest():
                return Operation(lambda: operations.save_weights(request), role, origin)
            case SaveWeightsForSamplerRequest():
                return Operation(lambda: operations.save_weights_for_sampler(request), role, origin)
            case LoadWeightsRequest():
                return Operation(lambda: operations.load_weights(request), role, origin)

    async def quiesce(self) -> None:
        """Start no more work; return once none is running, not even in the background."""
        await self.queue.pause()
        if self.queue.later:
            await asyncio.wait(self.queue.later)

    async def abort_background(self) -> None:
        """Give up what goes on in the background, and return once it has ended."""
        later = self.queue.later
        for task in later:
            task.cancel()
        if later:
            await asyncio.wait(later)


def role_of(request: OrderedRequest) -> Role:
    """Return a request's role in the step that is being built."""
    match request:
        case ForwardBackwardRequest():
            return "other" if request.forward_only else "gradient"
        case OptimStepRequest():
            return "step"
        case SaveWeightsRequest():
            return "save"
        case LoadWeightsRequest():
            return "load"
        case _:
            return "other"


def new_model(
    model_id: ModelId, spec: ModelSpec, backend: Backend, samplers: Samplers, results: Results
) -> LiveModel:
    """Return a model that has not begun and has no requests."""
    limits, timings = backend.config.limits, backend.config.timings
    samplers.learn_owner(model_id, spec.owner)
    operations = Operations(model_id, spec, backend, samplers)
    queue = ModelQueue(
        model_id,
        results,
        owner=spec.owner,
        max_queued_bytes=limits.max_queued_bytes,
        gap_seconds=timings.gap_seconds,
        drop_gradient=operations.drop_gradient,
    )
    return LiveModel(model_id, spec, operations, queue, lineage=[])


def latest_checkpoint(models: Iterable[LiveModel]) -> str | None:
    """Return the path of the checkpoint that was written last of any of these models."""
    written = [model.operations.latest for model in models]
    latest = max((each for each in written if each), key=lambda m: m.created_at, default=None)
    return latest.tinker_path if latest is not None else None
